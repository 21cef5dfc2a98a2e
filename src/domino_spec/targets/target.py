"""A frozen target model: forwards over a cache that capture hidden states, embedding, logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from domino_spec.errors import TargetError
from domino_spec.quantization.modules import weights_in_words
from domino_spec.targets.cache import TargetCache
from domino_spec.targets.recurrent import find_recurrent_modules
from domino_spec.targets.support import (
    EACH_TOKEN,
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    check_config,
    check_model,
    image_unsupported_reason,
    layer_types,
    linear_layers,
    static_rope_limit,
    unwrap_adapters,
)


@dataclass(frozen=True)
class TargetOutput:
    """Of one forward: logits of the kept positions, and the captured hidden states of all."""

    logits: Tensor  # [batch, kept, vocabulary]
    captured: Tensor | None  # [batch, tokens, captured layers * hidden]


_MASKED_ATTENTION = ("sdpa", "eager", EACH_TOKEN)
"""The implementations that take a mask of any form."""

_ReducedHead = tuple[Tensor, tuple[int, int], tuple[Tensor, Tensor | None]]
"""Tokens, the state of the weight they were taken from, and its rows."""


class Target:
    """Any decoder-only Transformers model whose cache can be rolled back."""

    def __init__(self, model: Any, *, name: str | None = None) -> None:
        model = unwrap_adapters(model)
        self.name = name or getattr(model.config, "name_or_path", "") or type(model).__name__
        check_config(model.config, self.name)
        check_model(model, self.name)
        self.model = model
        self.config = model.config.get_text_config()
        self.layers = find_layers(model, int(self.config.num_hidden_layers))
        self.capture_points: Sequence[nn.Module] = (*self.layers, find_decoder(model))
        self.recurrent_modules = find_recurrent_modules(
            self.layers, linear_layers(self.config), self.name
        )
        self.embedding: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self._forward_names = frozenset(inspect.signature(model.forward).parameters)
        self.vocab_size = int(self.config.vocab_size)
        # How the model turns these modules' outputs into its own; `probe_target` finds them.
        self.embedding_scale: float = 1.0
        self.logit_scale: float = 1.0
        self.logit_softcap: float | None = None
        self.batch_refusal: str | None = None
        self._reduced: _ReducedHead | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def final_hidden_id(self) -> int:
        """The id in `capture_layers` of what the lm_head reads: the states after the final norm."""
        return len(self.layers)

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for; None when it does not say."""
        length = getattr(self.config, "max_position_embeddings", None)
        limits = [int(limit) for limit in (length, self.static_rope_limit) if limit is not None]
        return min(limits, default=None)

    @property
    def static_rope_limit(self) -> int | None:
        """Length past which the model's RoPE frequencies change; None if they never do."""
        return static_rope_limit(self.config)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """The same in words, with the kinds of quantised weights and what multiplies them."""
        name = str(self.dtype).removeprefix("torch.")
        weights = weights_in_words(self.model)
        return name if weights is None else f"{name} ({weights})"

    @property
    def packing_refusal(self) -> str | None:
        """Why no mask keeps documents in one row apart; None if one does."""
        if self.recurrent_modules:
            return (
                f"{self.name} ({type(self.model).__name__}) has linear-attention layers, whose "
                "state no mask resets between the documents of a row; they are read one by one."
            )
        return self.batch_refusal

    @property
    def image_unsupported_reason(self) -> str | None:
        """Why prompts hold no images, in words; None if they may."""
        return image_unsupported_reason(self.model)

    def check_images(self) -> None:
        """Refuse images where the model does not read them."""
        reason = self.image_unsupported_reason
        if reason is not None:
            raise TargetError(
                f"the prompt holds images, which {self.name} does not take: {reason}. Give text "
                "alone, or a vision-language target."
            )

    @property
    def reuse_refusal(self) -> str | None:
        """Why no prompt goes on from the beginning of another's states; None if one may."""
        if self.recurrent_modules:
            return (
                f"{self.name} ({type(self.model).__name__}) has linear-attention layers, which "
                "keep one state of all tokens of a text and none of its beginnings."
            )
        return None

    def check_tree(self, nodes: int) -> None:
        """Refuse draft trees where verified branches would mix in one state."""
        if nodes and self.recurrent_modules:
            raise TargetError(
                f"a tree of {nodes} drafts is asked for, but {self.name} "
                f"({type(self.model).__name__}) has linear-attention layers: their state follows "
                "one text, so that only chains can be verified. Leave the tree out (tree=0)."
            )

    # What the drafter borrows ---------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings as the first layer sees them, [..., hidden]."""
        embedded: Tensor = self.embedding(tokens.to(self.device))
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits as the model itself would report them, for all tokens or only these."""
        hidden = self._as_lm_head_takes(hidden)
        if tokens is not None and self.lm_head_is_plain:
            return self.finish_logits(F.linear(hidden, *self._lm_head_rows(tokens)))
        logits = self.finish_logits(self.lm_head(hidden))
        return logits if tokens is None else logits[..., tokens]

    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        """The lm_head's weights for these tokens, where they alone make the logits."""
        extras = {
            "a quantised, adapted or off-loaded lm_head": not self.lm_head_is_plain,
            "an lm_head with a bias": getattr(self.lm_head, "bias", None) is not None,
            f"logits multiplied by {self.logit_scale:g}": self.logit_scale != 1.0,
            f"logits capped at {self.logit_softcap}": self.logit_softcap is not None,
        }
        found = [extra for extra, present in extras.items() if present]
        if found:
            raise TargetError(
                f"{self.name} has {' and '.join(found)}, which rows of its lm_head do not hold; "
                "expected logits that are the product with plain weights alone."
            )
        return self._lm_head_rows(tokens.to(self.device))[0].detach()

    def forget_lm_head_rows(self) -> None:
        """Gather them anew at their next use: what the tokens' tensor holds may have changed."""
        self._reduced = None

    def _as_lm_head_takes(self, hidden: Tensor) -> Tensor:
        weight = getattr(self.lm_head, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and not weight.is_meta:
            return hidden.to(weight.device, weight.dtype)
        return hidden.to(self.device, self.dtype)

    def _lm_head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The lm_head's weight and bias for a reduced vocabulary, gathered once."""
        weight, bias = self.lm_head.weight, getattr(self.lm_head, "bias", None)
        assert isinstance(weight, Tensor)
        state = (weight.data_ptr(), weight._version)
        if self._reduced is None or self._reduced[0] is not tokens or self._reduced[1] != state:
            rows = weight[tokens], None if bias is None else bias[tokens]
            self._reduced = (tokens, state, rows)
        return self._reduced[2]

    @property
    def lm_head_is_plain(self) -> bool:
        """Whether logits of a few tokens are the product with their rows alone."""
        # A subclass may be quantised, adapted or off-loaded: those go through their own forward.
        return type(self.lm_head) is nn.Linear and not hasattr(self.lm_head, "_hf_hook")

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its lm_head's output."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    # Forwards -------------------------------------------------------------------------------

    def new_cache(self, batch: int) -> TargetCache:
        """An empty cache; refuses batches the model cannot mask."""
        if batch > 1 and self.batch_refusal:
            raise TargetError(self.batch_refusal)
        return TargetCache(batch, self.config, self.recurrent_modules)

    def forward(
        self,
        tokens: Tensor,  # [batch, n]
        cache: TargetCache,
        *,
        capture_layers: Sequence[int] = (),
        keep: Sequence[int] | None = None,
        last_positions: Sequence[int] | None = None,
        rollback: bool = True,
        multimodal_inputs: Mapping[str, Any] | None = None,
    ) -> TargetOutput:
        """Run tokens after each sequence's length; the caller commits what it keeps.

        `keep` names the positions whose logits are wanted; None means all. Tokens after a
        sequence's last position will be thrown away and must not reach past the model's context.
        Without `rollback` all tokens of all sequences will be committed. `multimodal_inputs` are
        a processor's, of one sequence's whole prompt.
        """
        tokens = tokens.to(self.device)
        count = tokens.shape[1]
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": cache.past,
            "use_cache": True,
            "return_dict": True,
        }
        if self.takes("position_ids"):
            positions = cache.positions(count, self.device)
            if last_positions is not None:
                last = torch.tensor(last_positions, device=self.device).unsqueeze(1)
                positions = torch.minimum(positions, last)
            deltas = torch.tensor(cache.rope_deltas, device=self.device).unsqueeze(1)
            inputs["position_ids"] = positions + deltas
        if cache.ragged:
            inputs["attention_mask"] = self.attention_mask(
                *cache.visibility(count, self.device),
                what="sequences of different lengths",
                otherwise=" or decode one sequence at a time",
            )
        if multimodal_inputs:
            inputs |= self._prefill_inputs(tokens, cache, multimodal_inputs)
        kept = None if keep is None else torch.tensor(sorted(set(keep)), device=self.device)
        keeps_inside = kept is not None and self.takes("logits_to_keep")
        if keeps_inside:
            inputs["logits_to_keep"] = kept
        with (
            torch.no_grad(),
            evaluating(self.model),
            cache.forwarding(count, rollback=rollback),
            capturing(self.capture_points, capture_layers) as outputs,
        ):
            logits: Tensor = self.model(**inputs).logits
        if kept is not None and not keeps_inside:
            logits = logits[:, kept]
        captured = self.joined(outputs, capture_layers) if capture_layers else None
        return TargetOutput(logits=logits, captured=captured)

    def _prefill_inputs(
        self,
        tokens: Tensor,  # [1, n]
        cache: TargetCache,
        multimodal_inputs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The forward's inputs for a prompt with images, M-RoPE's positions among them.

        The model keeps a delta of its own, which the next prompt overwrites; ours stays with the
        sequence's cache.
        """
        self.check_images()
        if tokens.shape[0] != 1 or cache.slots:
            raise TargetError(
                f"a prompt with images is in a forward of {tokens.shape[0]} sequences after "
                f"{cache.slots} cached tokens; expected the whole prompt of one sequence."
            )
        given = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in multimodal_inputs.items()
        }
        found = {name: value for name, value in given.items() if self.takes(name)}
        index = getattr(self.model.base_model, "get_rope_index", None)
        if index is not None:
            names = inspect.signature(index).parameters
            own = {name: value for name, value in given.items() if name in names}
            found["position_ids"], deltas = index(tokens, **own)  # [3, 1, n], [1, 1]
            cache.rope_deltas = [int(deltas.item())]
        return found

    def attention_mask(
        self, visible: Tensor, distance: Tensor, *, what: str, otherwise: str = ""
    ) -> Tensor | dict[str, Tensor | None] | None:
        """As the model takes it, from who sees whom and how far away, [batch, queries, keys].

        One for each kind of attention that the model mixes; linear attention takes none.
        """
        attention = self.model.config._attn_implementation
        if attention not in _MASKED_ATTENTION:
            raise TargetError(
                f"{what} need a mask that {attention!r} attention does not take; load the target "
                f"with attn_implementation='sdpa'{otherwise}."
            )
        window: Any = getattr(self.config, "sliding_window", None)
        masks: dict[str, Tensor | None] = {}
        for kind in set(layer_types(self.config)):
            if kind == LINEAR_ATTENTION:
                masks[kind] = None
                continue
            seen = visible & (distance < window) if kind == SLIDING_ATTENTION else visible
            if attention == "eager":  # which adds its mask to the scores
                lowest = torch.finfo(self.dtype).min
                seen = torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, lowest)
            masks[kind] = seen.unsqueeze(1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def takes(self, name: str) -> bool:
        """Whether the model's forward knows this argument."""
        return name in self._forward_names

    def joined(self, outputs: dict[int, Tensor], capture_layers: Sequence[int]) -> Tensor:
        """Captured states concatenated, [batch, n, captured layers * hidden]."""
        return torch.cat([outputs[index].to(self.device) for index in capture_layers], dim=-1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, leaving the caller's model in the mode it was in."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head: what it returns goes into the lm_head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model


def find_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers: the outermost ModuleList of the right length."""
    found = [
        (name.count("."), name, module)
        for name, module in find_decoder(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise TargetError(
            f"{type(model).__name__} holds no list of {num_layers} decoder layers to capture; "
            "expected a ModuleList as in Llama, Qwen or Gemma."
        )
    return min(found, key=lambda entry: entry[:2])[2]


def first_tensor(output: Any) -> Tensor:
    """The hidden states in a layer's output, which is a tensor or a tuple that starts with one."""
    states = output[0] if isinstance(output, (tuple, list, ModelOutput)) else output
    if not isinstance(states, Tensor):
        raise TargetError(f"a captured layer returned {type(states).__name__}; expected a tensor.")
    return states


@contextmanager
def capturing(points: Sequence[nn.Module], ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of these layers while the context is open.

    Hooks sit on the layers themselves: the model's own list of hidden states would hold every
    layer, and its last entry is already normed. The id after the last layer's is the decoder as a
    whole: its output is what the lm_head turns into logits.
    """
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = first_tensor(output)

        return hook

    handles = [points[index].register_forward_hook(keep(index)) for index in ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Reading:
    """What a target says about sequences it was shown whole."""

    captured: Tensor  # [batch, n, captured layers * hidden]
    hidden: Tensor  # [batch, n, hidden]: what `Target.logits` turns into the next token's logits


@torch.no_grad()
def read(
    target: Target,
    tokens: Tensor,  # [batch, n]
    *,
    capture_layers: Sequence[int],
    positions: Tensor | None = None,  # [batch, n]: restart with each packed document
    documents: Tensor | None = None,  # [batch, n]: None where each row is one document
) -> Reading:
    """Captured and final hidden states of every position, without logits and without a cache.

    Rows may be padded on the right: no earlier position sees it. Several documents in a row
    are kept apart by `documents` and `positions`.
    """
    tokens = tokens.to(target.device)
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "return_dict": True}
    if documents is not None:
        if target.packing_refusal:
            return _read_apart(target, tokens, documents, capture_layers)
        assert positions is not None, "packed documents come with their positions"
        at, number = positions.to(target.device), documents.to(target.device)
        distance = at.unsqueeze(2) - at.unsqueeze(1)  # [batch, queries, keys]
        visible = (number.unsqueeze(2) == number.unsqueeze(1)) & (distance >= 0)
        inputs["attention_mask"] = target.attention_mask(
            visible, distance, what="several documents in one row"
        )
    if positions is not None and target.takes("position_ids"):
        inputs["position_ids"] = positions.to(target.device)
    with (
        evaluating(target.model),
        capturing(target.capture_points, capture_layers) as outputs,
        _without_logits(target.lm_head) as states,
    ):
        target.model(**inputs)
    return Reading(captured=target.joined(outputs, capture_layers), hidden=states[-1])


def _read_apart(
    target: Target, tokens: Tensor, documents: Tensor, capture_layers: Sequence[int]
) -> Reading:
    """Document by document, for models that no mask keeps from looking across."""
    parts = []
    for row, numbers in zip(tokens, documents, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        for document in row.split(lengths):
            reading = read(target, document.unsqueeze(0), capture_layers=capture_layers)
            parts.append((reading.captured[0], reading.hidden[0]))
    captured_of, hidden_of = zip(*parts, strict=True)
    return Reading(
        captured=torch.cat(captured_of).view(*tokens.shape, -1),
        hidden=torch.cat(hidden_of).view(*tokens.shape, -1),
    )


@contextmanager
def _without_logits(lm_head: nn.Module) -> Iterator[list[Tensor]]:
    """Keep what goes into the lm_head and do not multiply: most positions need no logits."""
    states: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return hidden[..., :1]

    own = lm_head.__dict__.get("forward")
    object.__setattr__(lm_head, "forward", forward)
    try:
        yield states
    finally:
        if own is None:
            del lm_head.__dict__["forward"]
        else:
            object.__setattr__(lm_head, "forward", own)
