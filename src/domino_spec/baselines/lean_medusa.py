"""Medusa on the engine: the state behind each token in slots, all heads in one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.baselines.lean_output import LeanOutput, placed
from domino_spec.baselines.medusa import Medusa
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.kernels.linear import linear
from domino_spec.engine.kernels.packing import Packed, Weight, packed
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import Draws
from domino_spec.engine.sources import InSlots, SlotStates


class LeanMedusa(InSlots[SlotStates]):
    """Heads on the state whose logits gave the anchor."""

    def __init__(
        self, drafter: Medusa, target: InferenceModel, *, slots: int, capacity: int, pack: bool
    ) -> None:
        drafter = placed(drafter, target)
        self.config = drafter.config
        self.taps: Sequence[int] = drafter.taps
        self._output = LeanOutput(target, drafter.draft_tokens, pack=pack)
        first, *rest = (
            [head.get_submodule(f"blocks.{layer}") for head in drafter.heads]
            for layer in range(drafter.config.num_layers)
        )
        # All heads' first blocks read one state: one product. Behind them each has its own.
        weights = torch.cat([block.get_parameter("weight").detach() for block in first])
        self._first: Weight = packed(weights) if pack else weights
        self._first_bias = torch.cat([block.get_parameter("bias").detach() for block in first])
        self._rest = [_stacked(blocks) for blocks in rest]
        self.cache = SlotStates(
            drafter.config.hidden_size,
            slots=slots,
            capacity=capacity,
            dtype=target.dtype,
            device=target.device,
        )

    @property
    def facts(self) -> list[Any]:
        """Whatever changes what its drafts cost."""
        return [self.config.to_dict()]

    def observe(self, taps: Tensor, tokens: Tensor, rows: AttentionMetadata) -> None:
        """Keep what the lm_head read at every token."""
        self.cache.write(taps.view(*tokens.shape, -1), rows)

    def propose(self, anchors: Tensor, rows: AttentionMetadata, depth: int, draws: Draws) -> Tensor:
        """All heads at once."""
        return self.chooser(anchors, rows, depth)(draws)

    def chooser(
        self,
        anchors: Tensor,  # noqa: ARG002
        rows: AttentionMetadata,
        depth: int,
    ) -> Callable[[Draws], Tensor]:
        """Each head's choice from its own state, whatever the others chose."""
        # The anchor itself has not been read: the last state is that of the token before it.
        lasts = (rows.starts - 1).clamp(min=0)  # the spare slot's rows have none
        before = self.cache.read(rows.slots, self.cache.places(lasts, 1))  # [rows, 1, hidden]
        weight, bias = self._first_of(depth)
        made = linear(before[:, 0], weight, bias=bias)
        hidden = before + F.silu(made).view(len(before), -1, before.shape[2])[:, :depth]
        if self._rest:
            hidden = hidden.transpose(0, 1)  # [depth, rows, hidden]
            for weight, bias in self._rest:
                hidden = hidden + F.silu(torch.baddbmm(bias[:depth], hidden, weight[:depth]))
            hidden = hidden.transpose(0, 1)
        return lambda draws: self._output.drafts(hidden, rows.starts, draws)

    def _first_of(self, depth: int) -> tuple[Weight, Tensor]:
        """The first blocks of so many heads; of all, where they lie packed."""
        if isinstance(self._first, Packed):
            return self._first, self._first_bias
        size = depth * self.config.hidden_size
        return self._first[:size], self._first_bias[:size]


def _stacked(blocks: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """One layer of all heads: weights [heads, in, out] and biases [heads, 1, out]."""
    weights = torch.stack([block.get_parameter("weight").detach().T for block in blocks])
    biases = torch.stack([block.get_parameter("bias").detach() for block in blocks])
    return weights, biases.unsqueeze(1)
