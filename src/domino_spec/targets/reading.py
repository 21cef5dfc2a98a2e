"""One forward over whole known sequences: taps and the states behind the logits, no cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.targets.masks import packed_mask
from domino_spec.targets.support import layer_types
from domino_spec.targets.taps import tapped
from domino_spec.targets.target import Target, evaluating


@dataclass(frozen=True)
class Reading:
    """What a target says about sequences it was shown whole."""

    taps: Tensor  # [rows, n, taps * hidden]
    hidden: Tensor  # [rows, n, hidden]: what `Target.logits` turns into the next token's logits


@torch.no_grad()
def read(
    target: Target,
    tokens: Tensor,  # [rows, n]
    *,
    taps: Sequence[int],
    positions: Tensor | None = None,  # [rows, n]: restart with each packed document
    documents: Tensor | None = None,  # [rows, n]: None where each row is one document
) -> Reading:
    """Taps and final states of every position, without logits and without a cache.

    Rows may be padded on the right: no earlier position sees it. Several documents in a row
    are kept apart by `documents` and `positions`.
    """
    tokens = tokens.to(target.device)
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "return_dict": True}
    if documents is not None:
        if target.batch_refusal:
            return _read_apart(target, tokens, documents, taps)
        assert positions is not None, "packed documents come with their positions"
        inputs["attention_mask"] = packed_mask(
            positions.to(target.device),
            documents.to(target.device),
            kinds=layer_types(target.config),
            window=getattr(target.config, "sliding_window", None),
            attention=target.model.config._attn_implementation,
            dtype=target.dtype,
        )
    if positions is not None and target.takes("position_ids"):
        inputs["position_ids"] = positions.to(target.device)
    with (
        evaluating(target.model),
        tapped(target.tap_points, taps) as outputs,
        _without_logits(target.lm_head) as states,
    ):
        target.model(**inputs)
    return Reading(taps=target.joined(outputs, taps), hidden=states[-1])


def _read_apart(target: Target, tokens: Tensor, documents: Tensor, taps: Sequence[int]) -> Reading:
    """Document by document, for models that no mask keeps from looking across."""
    parts = []
    for row, numbers in zip(tokens, documents, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        for document in row.split(lengths):
            reading = read(target, document.unsqueeze(0), taps=taps)
            parts.append((reading.taps[0], reading.hidden[0]))
    taps_of, hidden_of = zip(*parts, strict=True)
    return Reading(
        taps=torch.cat(taps_of).view(*tokens.shape, -1),
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
