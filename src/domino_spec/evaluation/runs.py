"""Decodes many prompts in batches through the reference loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from domino_spec.api.prompts import check_prompt
from domino_spec.decoding import Proposer, Row, RowStats, SamplingParams, decode, make_sampler
from domino_spec.decoding.stopping import at_eos, at_length
from domino_spec.errors import InputError
from domino_spec.targets import Target


@dataclass(frozen=True)
class Answer:
    """What one prompt gave: its tokens, the prefill's first, and the counts of its cycles."""

    tokens: tuple[int, ...]
    stats: RowStats


def decode_prompts(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    eos: Collection[int],
    batch_size: int,
) -> list[Answer]:
    """Every prompt's answer, in order. Prompt i draws from seed + i whatever its batch."""
    for prompt in prompts:
        check_prompt(prompt, params.max_new_tokens, target)
    answers: dict[int, Answer] = {}
    for batch in batches([len(prompt) for prompt in prompts], target, batch_size):
        rows = [
            Row(
                index,
                prompts[index],
                sampler=make_sampler(params, row=index, device=target.device),
                stop_rules=[at_eos(eos), at_length()],
                max_new_tokens=params.max_new_tokens,
                device=target.device,
            )
            for index in batch
        ]
        for _ in decode(target, proposer, rows):
            pass
        answers.update({row.index: Answer(tuple(row.generated), row.stats) for row in rows})
    return [answers[index] for index in range(len(prompts))]


def batches(lengths: Sequence[int], target: Target, size: int) -> list[list[int]]:
    """Indices in batches of similar lengths; one a batch where rows cannot share a forward."""
    if size < 1:
        raise InputError(f"the batch size is {size}; expected 1 or more.")
    size = 1 if target.batch_refusal else size
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[first : first + size] for first in range(0, len(order), size)]
