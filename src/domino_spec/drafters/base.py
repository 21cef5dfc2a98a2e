"""What trained drafters share in both loops: the target's embedding and lm_head, and the fit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.provenance import Provenance
from domino_spec.decoding.drafter import Drafter
from domino_spec.drafter import DraftModule
from domino_spec.engine.cache import PageTable
from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.kernels.linear import Normed, embedded, linear, normed
from domino_spec.engine.kernels.packing import Weight, look_up, packed, page_out
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.base import InferenceModel, rotary_table
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
            if pack and isinstance(model.lm_head, Tensor):
                page_out(model.lm_head)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding."""
        return look_up(self.embedding, tokens)

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


class ModelDrafter(Drafter):
    """A drafter with a trained model, which reads the target's embedding and lm_head."""

    model: DraftModule
    has_logits = True

    def __init__(
        self,
        model: DraftModule,
        *,
        name: str | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        self.model, self.config = model, model.config
        self.kind = model.config.kind
        self.capture_layers = model.capture_layers
        self.default_depth, self.max_depth = model.config.default_depth, model.config.max_depth
        super().__init__(name=name, provenance=provenance)

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Heads that the kernels do not take."""
        size = getattr(self.config, "head_dim", None)
        if device.type == "cuda" and size is not None and not kernels_take(size):
            return f"the drafter's heads are {size} wide; the kernels want a multiple of 16"
        return None

    def _place(self, model: Target | InferenceModel, *, pack: bool) -> Any:
        """The draft model where the target is: a copy, where the caller's own is not so.

        On the engine it has the inference model's type, in the reference loop its own.
        """
        own: Any = self.model
        check_fit(self.config, model)
        in_loop = isinstance(model, Target)
        self._dtype: torch.dtype = own.dtype if in_loop else model.dtype
        if (own.device, own.dtype) != (model.device, self._dtype):
            own = copy.deepcopy(own).to(model.device, self._dtype)
        self._vocabulary: WeightVocabulary | TargetVocabulary
        if isinstance(model, Target):
            self._vocabulary = TargetVocabulary(model, own.draft_tokens, self._dtype)
        else:
            self._vocabulary = WeightVocabulary(model, own.draft_tokens, pack=pack)
        self._rotary_module: nn.Module | None = None
        return own.eval()

    def resize(self, *, slots: int, capacity: int, pages: PageTable | None = None) -> None:
        super().resize(slots=slots, capacity=capacity, pages=pages)
        if self._rotary_module is not None:
            self._rotary = rotary_table(self._rotary_module, capacity, self.device)


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
