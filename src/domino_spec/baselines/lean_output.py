"""What the baselines share on the engine: the target's lm_head, and where their weights lie."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor

from domino_spec.baselines.base import BaselineDrafter
from domino_spec.engine.draft import check_fit
from domino_spec.engine.kernels.linear import Normed, linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import Draws

Kind = TypeVar("Kind", bound=BaselineDrafter)  # type: ignore[type-arg]


class LeanOutput:
    """From states to drafts: the target's lm_head, or its rows for a reduced vocabulary."""

    def __init__(self, target: InferenceModel, draft_tokens: Tensor | None, *, pack: bool) -> None:
        self._weight: Weight = target.output
        self._bias = target.lm_head_bias
        self._tokens = draft_tokens
        if draft_tokens is not None:
            rows = target.lm_head[draft_tokens]
            self._weight = packed(rows) if pack else rows
            self._bias = None if self._bias is None else self._bias[draft_tokens]

    def drafts(self, hidden: Tensor, starts: Tensor, draws: Draws) -> Tensor:
        """Drafts [rows, n] from states [rows, n, hidden]; the first stands behind the anchor."""
        logits = linear(hidden.flatten(0, 1), self._weight, bias=self._bias)
        return draws.choose(logits.view(*hidden.shape[:2], -1), starts, self._tokens, cut=False)

    def next_tokens(self, states: Normed, starts: Tensor, draws: Draws) -> Tensor:
        """One draft a row, [rows], from states [rows, hidden]."""
        logits = linear(states, self._weight, bias=self._bias).unsqueeze(1)
        return draws.choose(logits, starts, self._tokens, cut=False)[:, 0]


def placed(drafter: Kind, target: InferenceModel) -> Kind:
    """The drafter where the target is and in its type: a copy, where the caller's own is not so."""
    check_fit(drafter.config, target)
    if (drafter.device, drafter.dtype) != (target.device, target.dtype):
        drafter = copy.deepcopy(drafter).to(target.device, target.dtype)
        drafter.compute_buffers(target.device)  # in their own type
    return drafter.eval()
