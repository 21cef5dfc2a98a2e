"""The lean drafter: its context in slots, a block a row, and the head's rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.drafter.config import SLIDING_ATTENTION
from domino_spec.engine.attention import AttentionMetadata, store_context
from domino_spec.engine.cache import SlotCache
from domino_spec.engine.kernels.linear import embedded, linear, linear_then_norm
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.kernels.rollout import roll_out
from domino_spec.engine.kernels.topk import top_candidates
from domino_spec.engine.models.base import InferenceModel, draft_shape, kernels_take, rotary_table
from domino_spec.engine.models.llama import run_layer
from domino_spec.engine.sampling import Draws
from domino_spec.engine.weights import adopt_layers, nbytes
from domino_spec.errors import MismatchError


class LeanDrafter:
    """A drafter's weights and the keys and values of the tokens its target has verified."""

    def __init__(
        self,
        drafter: Drafter,
        target: InferenceModel,
        *,
        slots: int,
        capacity: int,
        candidates: int | None = None,
        pack: bool = False,
    ) -> None:
        config = drafter.config
        check_fit(config, target)
        if (drafter.device, drafter.dtype) != (target.device, target.dtype):
            drafter = copy.deepcopy(drafter)  # the caller's own stays as it is
        drafter.to(target.device, target.dtype).eval()
        self.config = config
        self.head = drafter.head
        self.target = target
        self.candidates = candidates
        self.taps = config.target_layer_ids
        self.shape = draft_shape(
            config,
            tuple(
                config.sliding_window if kind == SLIDING_ATTENTION else None
                for kind in config.layer_types
            ),
        )
        backbone = drafter.backbone
        self.fc: Weight = backbone.fc.weight.detach()
        self.hidden_norm = backbone.hidden_norm.weight.detach()
        self.norm = backbone.norm.weight.detach()
        self.layers, projections = adopt_layers(backbone.layers)
        # Of context tokens only keys and values are wanted: the rows behind the queries'.
        self.kv: Weight = projections[:, config.num_heads * config.head_dim :]
        norms = [w.k_norm for w in self.layers if w.k_norm is not None]
        self.k_norm = torch.stack(norms) if norms else None
        self._positions = backbone.rotary
        self.rotary = rotary_table(self._positions, capacity, target.device)
        self._masks = torch.full(
            (1, config.block_size - 1), config.mask_token_id, device=target.device
        )
        self.draft_tokens = drafter.draft_tokens
        self.lm_head, self.lm_head_bias = target.lm_head, target.lm_head_bias
        if self.draft_tokens is not None:  # the rows of a reduced vocabulary, gathered once
            self.lm_head = self.lm_head[self.draft_tokens]
            if self.lm_head_bias is not None:
                self.lm_head_bias = self.lm_head_bias[self.draft_tokens]
        self.output: Weight = target.output if self.draft_tokens is None else self.lm_head
        if pack:
            self.fc, self.output = packed(self.fc), packed(self.output)
            self.kv = packed(self.kv.flatten(0, 1))
            self.layers = [weights.packed() for weights in self.layers]
        self.cache = SlotCache(
            layers=len(self.layers),
            slots=slots,
            kv_heads=config.num_kv_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            dtype=target.dtype,
            device=target.device,
        )

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""
        self.cache.resize(slots=slots, capacity=capacity)
        self.rotary = rotary_table(self._positions, capacity, self.target.device)

    def twin(self, target: InferenceModel, *, slots: int, capacity: int) -> LeanDrafter:
        """The same weights, for a twin of the target, with slots of its own."""
        other = copy.copy(self)
        other.target, other.cache = target, self.cache.twin()
        other.resize(slots=slots, capacity=capacity)
        return other

    def observe(self, taps: Tensor, tokens: Tensor, rows: AttentionMetadata) -> None:  # noqa: ARG002
        """Context keys and values of tapped states [rows * count, taps * hidden]."""
        feature = linear_then_norm(taps, self.fc, self.hidden_norm, self.shape.eps)
        kv = linear(feature, self.kv)
        store_context(kv, self.k_norm, self.cache.layers, self.rotary, rows, self.shape)

    def propose(self, anchors: Tensor, rows: AttentionMetadata, depth: int, draws: Draws) -> Tensor:
        """Drafts [rows, depth] behind each row's anchor [rows]."""
        hidden = self.hidden(anchors, rows)[:, :depth]
        return self.roll_out(hidden, anchors, rows, draws)

    def chooser(
        self, anchors: Tensor, rows: AttentionMetadata, depth: int
    ) -> Callable[[Draws], Tensor]:
        """The rollout over a backbone's states: for measurements."""
        hidden = self.hidden(anchors, rows)[:, :depth].clone()
        return lambda draws: self.roll_out(hidden, anchors, rows, draws)

    def hidden(self, anchors: Tensor, rows: AttentionMetadata) -> Tensor:
        """The backbone over a block a row: states behind each draft, [rows, max depth, hidden]."""
        config = self.config
        batch, block = anchors.shape[0], config.block_size
        tokens = torch.cat((anchors.unsqueeze(1), self._masks.expand(batch, -1)), dim=1)
        norms = [*(weights.input_norm for weights in self.layers), self.norm]
        states = embedded(tokens.flatten(), self.target.embedding, norms[0], self.shape.eps)
        inside = AttentionMetadata(rows.slots, rows.starts, block)
        for index, weights in enumerate(self.layers):
            window = self.shape.windows[index]
            states = run_layer(
                states,
                weights,
                self.cache.layer(index),
                self.rotary,
                inside,
                self.shape,
                causal=window is not None and config.causal_window,
                window=window,
                norm=norms[index + 1],
            )
        hidden = rms_norm(states.rows, self.norm, self.shape.eps)
        return hidden.view(batch, block, -1)[:, config.first_slot :]

    def roll_out(
        self, hidden: Tensor, anchors: Tensor, rows: AttentionMetadata, draws: Draws
    ) -> Tensor:
        """Base logits of all drafts, then the head, one draft after the other.

        What the target would cut off is not cut off here: such a draft is simply refused.
        """
        batch, depth, _ = hidden.shape
        flat = linear(hidden.flatten(0, 1), self.output, bias=self.lm_head_bias)
        if self.head is None and self.candidates is None:
            logits = flat.view(batch, depth, -1)
            return draws.choose(logits, rows.starts, self.draft_tokens, cut=False)
        columns = None
        if self.candidates is not None and self.candidates < flat.shape[1]:
            flat, columns = top_candidates(flat, self.candidates)
            columns = columns.view(batch, depth, -1)
        return roll_out(
            self.head,
            embedding=self.target.embedding,
            hidden=hidden,
            anchor_tokens=anchors,
            base=flat.view(batch, depth, -1),
            columns=columns,
            draft_tokens=self.draft_tokens,
            temperature=draws.temperature,
            seeds=draws.seeds,
            positions=None if draws.temperature is None else rows.starts + 1,
        )

    @property
    def facts(self) -> list[Any]:
        """Whatever changes what its drafts cost."""
        return [self.config.to_dict(), self.candidates]

    @property
    def nbytes(self) -> int:
        """What a cycle reads of the drafter's own weights: each once."""
        own = [self.fc, *(self.head.parameters() if self.head is not None else ())]
        return sum(weights.nbytes for weights in self.layers) + nbytes(own)


def check_fit(config: Any, target: InferenceModel) -> None:
    """What the loop would only notice as unwritten memory or a crash.

    `config` describes a drafter of any kind.
    """
    found = {
        "target layers": (config.num_target_layers, len(target.layers)),
        "hidden size": (config.hidden_size, target.shape.hidden),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    for name, (wanted, there) in found.items():
        if wanted != there:
            raise MismatchError(
                f"{name}: the drafter was made for {wanted}, the target has {there}. Use the "
                "target it was trained for."
            )


def why_not_drafts(config: DrafterConfig, device: torch.device) -> str | None:
    """What keeps a drafter off the engine, in words; None if nothing does."""
    return why_not_heads(config.head_dim, device)


def why_not_heads(head_dim: int, device: torch.device) -> str | None:
    """What keeps a drafter with heads so wide off the engine."""
    if device.type == "cuda" and not kernels_take(head_dim):
        return (
            f"the drafter's heads are {head_dim} wide; the kernels want a power of two, 16 or more"
        )
    return None
