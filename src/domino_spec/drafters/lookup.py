"""Prompt lookup: what followed the last few tokens when they stood in the text before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domino_spec.decoding.drafter import Drafter, DraftSampler
from domino_spec.drafter.names import DEFAULT_LOOKUP_DEPTH, LOOKUP
from domino_spec.engine.cache import SlotStates
from domino_spec.engine.models.base import InferenceModel
from domino_spec.errors import InputError
from domino_spec.targets import Target

LONGEST_MATCH = 3


class LookupDrafter(Drafter):
    """Proposes the continuation of the longest match, of the latest where there are several.

    Nothing is drawn: a draft that is certain is accepted as often by drawing the target's own
    token and comparing as by rejection, and both are exact. Where one sequence of a batch finds
    less than another, its drafts are filled up with its anchor. In the reference loop columns that
    no sequence fills are left out; a captured graph always has the same shape.
    """

    kind = LOOKUP
    cache: SlotStates

    def __init__(
        self,
        *,
        depth: int = DEFAULT_LOOKUP_DEPTH,
        longest: int = LONGEST_MATCH,
        name: str | None = None,
    ) -> None:
        if depth < 1 or longest < 1:
            raise InputError(
                f"prompt lookup of {depth} drafts and matches of {longest}; expected 1 or more."
            )
        self.default_depth = depth
        self.longest = longest
        super().__init__(name=name)

    @property
    def cost_key(self) -> list[Any]:
        """The whole capacity is searched."""
        return [LOOKUP, self.longest, self.cache.capacity]

    def _bind(self, model: Target | InferenceModel, *, pack: bool) -> None:  # noqa: ARG002
        self._trims = isinstance(model, Target)
        self.cache = SlotStates(dtype=torch.long, device=self.device)
        self.caches = (self.cache,)

    def update_cache(
        self,
        captured: Tensor,  # noqa: ARG002
        tokens: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
    ) -> None:
        """The tokens themselves are enough."""
        self.cache.write(tokens, slots, starts)

    def propose(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,  # noqa: ARG002
    ) -> Tensor:
        """Up to `depth` tokens that stood after the same few tokens before."""
        self.cache.write(anchors.unsqueeze(1), slots, starts)
        text = self.cache.of(slots)  # [batch, capacity]
        last = self.cache.places(starts, 1)
        found = self._after_match(text, last)
        places = found + torch.arange(depth, device=text.device)  # [batch, depth]
        drafts = text.gather(1, places.clamp(max=text.shape[1] - 1))
        known = (found > 0) & (places <= last)
        drafts = torch.where(known, drafts, anchors.unsqueeze(1))
        return drafts[:, : int(known.sum(dim=1).max())] if self._trims else drafts

    def _after_match(self, text: Tensor, last: Tensor) -> Tensor:
        """The place after the latest of the longest matches of each text's end; 0 without one.

        A match is of the tokens up to `last`, [batch, 1], and ends before it.
        """
        places = torch.arange(text.shape[1], device=text.device)  # after how many tokens
        same = (places > 0) & (places <= last)
        best = torch.zeros_like(last)
        for length in range(1, self.longest + 1):
            own = text.gather(1, (last - length + 1).clamp(min=0))
            same = same & (places >= length) & (last + 1 >= length)
            same = same & (text.roll(length, dims=1) == own)
            longer = torch.where(same, places, 0).amax(dim=1, keepdim=True)
            best = torch.where(longer > 0, longer, best)
        return best
