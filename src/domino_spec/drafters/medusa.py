"""Medusa in both loops: the state whose logits gave the anchor, kept in slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.decoding.drafter import DraftSampler
from domino_spec.drafter import Medusa, MedusaConfig
from domino_spec.drafters.base import ModelDrafter
from domino_spec.engine.cache import SlotStates
from domino_spec.engine.kernels.linear import linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.models.base import InferenceModel
from domino_spec.targets import Target


class MedusaDrafter(ModelDrafter):
    """Heads on the state whose logits gave the anchor; each chooses whatever the others chose."""

    config: MedusaConfig
    cache: SlotStates

    def _bind(self, model: Target | InferenceModel, *, pack: bool) -> None:
        module: Medusa = self._place(model, pack=pack)
        first, *rest = (
            [head.get_submodule(f"blocks.{layer}") for head in module.heads]
            for layer in range(module.config.num_layers)
        )
        # All heads' first blocks read one state: one product. After them each has its own.
        weights = torch.cat([block.get_parameter("weight").detach() for block in first])
        self._first: Weight = packed(weights) if pack else weights
        self._first_bias = torch.cat([block.get_parameter("bias").detach() for block in first])
        self._rest = [_stacked(blocks) for blocks in rest]
        self.cache = SlotStates(self.config.hidden_size, dtype=self._dtype, device=self.device)
        self.caches = (self.cache,)

    def update_cache(
        self, captured: Tensor, tokens: Tensor, *, slots: Tensor, starts: Tensor
    ) -> None:
        """Keep what the lm_head read at every token."""
        captured = captured.to(self.device, self._dtype)
        self.cache.write(captured.view(*tokens.shape, -1), slots, starts)

    def propose(
        self,
        anchors: Tensor,  # noqa: ARG002
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,
    ) -> Tensor:
        """All heads at once."""
        # The anchor itself has not been read: the last state is that of the token before it.
        lasts = (starts - 1).clamp(min=0)  # the spare slot has none
        before = self.cache.read(slots, self.cache.places(lasts, 1))  # [batch, 1, hidden]
        weight, bias = self._first_of(depth)
        made = linear(before[:, 0], weight, bias=bias)
        hidden = before + F.silu(made).view(len(before), -1, before.shape[2])[:, :depth]
        if self._rest:
            hidden = hidden.transpose(0, 1)  # [depth, batch, hidden]
            for weights, biases in self._rest:
                hidden = hidden + F.silu(torch.baddbmm(biases[:depth], hidden, weights[:depth]))
            hidden = hidden.transpose(0, 1)
        logits = self._vocabulary.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        return sampler.choose_drafts(logits, starts, self._vocabulary.tokens)

    def _first_of(self, depth: int) -> tuple[Weight, Tensor]:
        """The first blocks of so many heads; of all, where they lie packed."""
        if not isinstance(self._first, Tensor):
            return self._first, self._first_bias
        size = depth * self.config.hidden_size
        return self._first[:size], self._first_bias[:size]


def _stacked(blocks: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """One layer of all heads: weights [heads, in, out] and biases [heads, 1, out]."""
    weights = torch.stack([block.get_parameter("weight").detach().T for block in blocks])
    biases = torch.stack([block.get_parameter("bias").detach() for block in blocks])
    return weights, biases.unsqueeze(1)
