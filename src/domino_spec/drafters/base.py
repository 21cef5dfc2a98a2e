"""What trained drafters share: how they read the target's embedding and lm_head, and fit it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.kernels.linear import Normed, embedded, linear, normed
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.base import InferenceModel
from domino_spec.errors import MismatchError
from domino_spec.targets import Target


class WeightVocabulary:
    """An inference model's own embedding and lm_head, as kernels read them."""

    def __init__(self, model: InferenceModel, tokens: Tensor | None, *, pack: bool) -> None:
        # Target ids of the output tokens [output vocabulary]; None means all.
        self.tokens = tokens
        self.embedding = model.embedding
        self.lm_head, self.bias = model.lm_head, model.lm_head_bias
        self._output: Weight = model.output
        if tokens is not None:  # the rows of a reduced vocabulary, gathered once
            self.lm_head = self.lm_head[tokens]
            self.bias = None if self.bias is None else self.bias[tokens]
            self._output = packed(self.lm_head) if pack else self.lm_head

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding."""
        return self.embedding[tokens]

    def embed_normed(self, tokens: Tensor, norm: Tensor, eps: float) -> Normed:
        """The same, read by a norm."""
        return embedded(tokens, self.embedding, norm, eps)

    def logits(self, states: Tensor | Normed) -> Tensor:
        """One product."""
        return linear(states, self._output, bias=self.bias)


class TargetVocabulary:
    """A target's own calls: scaled, quantised, adapted or spread over devices as it may be."""

    def __init__(self, target: Target, tokens: Tensor | None, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self._target, self._dtype = target, dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """In the drafter's own type."""
        return self._target.embed(tokens).to(self._target.device, self._dtype)

    def embed_normed(self, tokens: Tensor, norm: Tensor, eps: float) -> Normed:
        """The same, read by a norm."""
        return normed(self.embed(tokens), norm, eps)

    def logits(self, states: Tensor | Normed) -> Tensor:
        """As the target itself would report them."""
        if isinstance(states, Normed):
            states = rms_norm(states.rows, states.norm, states.eps)
        return self._target.logits(states, self.tokens).to(states.device)


Vocabulary = WeightVocabulary | TargetVocabulary
"""The target's embedding and lm_head, the latter for a perhaps reduced vocabulary."""


def placed(module: nn.Module, model: Target | InferenceModel) -> Any:
    """A draft model where the target is: a copy, where the caller's own is not so.

    On the engine it has the inference model's type, in the reference loop its own.
    """
    own: Any = module
    check_fit(own.config, model)
    dtype = own.dtype if isinstance(model, Target) else model.dtype
    if (own.device, own.dtype) != (model.device, dtype):
        own = copy.deepcopy(own).to(model.device, dtype)
    return own.eval()


def vocabulary_of(model: Target | InferenceModel, module: Any, *, pack: bool) -> Vocabulary:
    """What a placed draft model reads of its target."""
    if isinstance(model, Target):
        return TargetVocabulary(model, module.draft_tokens, module.dtype)
    return WeightVocabulary(model, module.draft_tokens, pack=pack)


def check_fit(config: Any, model: Target | InferenceModel) -> None:
    """Refuse what a loop would only notice as unwritten memory or a crash."""
    hidden = model.hidden_size if isinstance(model, Target) else model.shape.hidden
    found = {
        "target layers": (config.num_target_layers, len(model.layers)),
        "hidden size": (config.hidden_size, hidden),
        "vocabulary": (config.vocab_size, model.vocab_size),
    }
    for name, (wanted, there) in found.items():
        if wanted != there:
            raise MismatchError(
                f"{name}: the drafter was made for {wanted}, the target has {there}. Use the "
                "target it was trained for."
            )


def unsupported_heads(head_dim: int, device: torch.device) -> str | None:
    """What keeps a drafter with heads so wide off the engine."""
    if device.type == "cuda" and not kernels_take(head_dim):
        return (
            f"the drafter's heads are {head_dim} wide; the kernels want a power of two, 16 or more"
        )
    return None
