"""Batches of sequences finished by the target, each with a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from domino_spec.api import DominoDecoder
from domino_spec.decoding import Row, RunStats, SamplingParams, make_sampler
from domino_spec.decoding.stopping import at_eos, at_length, at_strings
from domino_spec.errors import DataError

_SEEDS = 2**62


@dataclass(frozen=True)
class Finished:
    """One sequence; the end token is in it, a stop string too."""

    tokens: list[int]
    reason: str


def seed_of(*parts: object) -> int:
    """A seed that depends on these alone, not on who else is in the batch."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEEDS


def finish(
    decoder: DominoDecoder,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    end_ids: Collection[int] = (),
    end_text: str = "",
) -> list[Finished]:
    """Run one batch to its end on the reference loop, with drafts if the decoder has a drafter."""
    ends = {*decoder.eos_token_ids, *end_ids}
    device = decoder.target.device
    rows = []
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        rules = [at_eos(ends)]
        if end_text:
            rules.append(at_strings([end_text], decoder.tokenizer))
        rows.append(
            Row(
                index,
                prompt,
                # Not the row's place in the batch: the seed alone decides what is drawn.
                sampler=make_sampler(own, row=0, device=device),
                stop_rules=[*rules, at_length()],
                max_new_tokens=own.max_new_tokens,
                device=device,
            )
        )
    try:
        for _ in decoder.run(rows, RunStats()):
            pass
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"the device ran out of memory with a batch of {len(rows)}; use a smaller batch size."
        ) from error
    return [Finished(row.generated, row.finish_reason or "length") for row in rows]
