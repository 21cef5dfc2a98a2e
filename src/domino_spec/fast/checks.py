"""What an engine refuses, in words, before anything runs."""

from __future__ import annotations

import torch

from domino_spec.decoding import Row, SamplingParams
from domino_spec.errors import InputError, MismatchError
from domino_spec.fast.sampling import why_not_on_device
from domino_spec.fast.sources import AnySource, as_maker
from domino_spec.fast.target import check_tokens


def check_settings(
    drafter: AnySource | None,
    device: torch.device,
    *,
    slots: int,
    capacity: int,
    depth: int | None,
    candidates: int | None,
    graphs: bool | None,
) -> None:
    """Refuse an engine that could not run as it is asked to."""
    for name, value in (("slots", slots), ("capacity", capacity)):
        if value < 1:
            raise InputError(f"{name} is {value}; expected 1 or more.")
    if graphs and device.type != "cuda":
        raise InputError(f"graphs are CUDA's and the target is on {device}; leave graphs out.")
    if drafter is None:
        given = [n for n, v in (("depth", depth), ("candidates", candidates)) if v is not None]
        if given:
            raise InputError(f"{' and '.join(given)} without a drafter; leave out what drafts.")
        return
    if candidates is not None and candidates < 1:
        raise InputError(f"candidates is {candidates}; expected 1 or more, or None for all tokens.")
    maker = as_maker(drafter, candidates)
    if (reason := maker.why_not(device)) is not None:
        raise MismatchError(f"{reason}. Use the reference loop.")
    most = maker.most_drafts
    if depth is not None and not 0 <= depth <= (depth if most is None else most):
        end = "or more" if most is None else f"to {most}"
        raise InputError(f"depth is {depth}; the drafter gives 0 {end} drafts.")


def check_row(
    row: Row, params: SamplingParams, *, capacity: int, vocab_size: int, chunk: int
) -> None:
    """Refuse a row that does not fit, that has begun elsewhere, or that needs another loop."""
    if chunk < 1:
        raise InputError(f"chunk is {chunk}; expected 1 or more tokens.")
    reason = why_not_on_device(params)
    if row.scores is not None:
        reason = "it keeps scores"
    if reason is not None:
        raise InputError(
            f"the row cannot run on the engine: {reason}. Decode it with the reference loop."
        )
    if row.generated or row.finish_reason is not None:
        raise InputError(
            f"the row has {len(row.generated)} tokens already; the engine begins with a prompt. "
            "Make a new row whose prompt holds them."
        )
    if not row.prompt:
        raise InputError("the prompt is empty; expected at least one token.")
    check_tokens(row.prompt, vocab_size)
    needed = len(row.prompt) + row.max_new_tokens
    if needed > capacity:
        raise InputError(
            f"the row needs {needed} tokens ({len(row.prompt)} of prompt and {row.max_new_tokens} "
            f"new); a slot holds {capacity}. Shorten it, or make the engine with a larger capacity."
        )
