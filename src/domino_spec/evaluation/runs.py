"""Decodes many prompts in batches through the reference loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from domino_spec.api.prompts import check_prompt
from domino_spec.decoding import Proposer, RowStats, SamplingParams, decode
from domino_spec.decoding import Sequence as Decoded
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
        sequences = [make_sequence(index, prompts[index], params, eos=eos) for index in batch]
        for _ in decode(target, proposer, sequences):
            pass
        answers.update({s.index: Answer(tuple(s.output), s.stats) for s in sequences})
    return [answers[index] for index in range(len(prompts))]


def greedy_counts(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    batch_size: int,
) -> RowStats:
    """The counts of all prompts together, decoded greedily: for drafters that nobody simulates."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    total = RowStats()
    for answer in decode_prompts(target, proposer, prompts, params, eos=eos, batch_size=batch_size):
        total.add(answer.stats)
    return total


def make_sequence(
    index: int, prompt: Sequence[int], params: SamplingParams, *, eos: Collection[int]
) -> Decoded:
    """A sequence that draws from the seed and its own number, whatever its batch."""
    return Decoded(prompt, params, index=index, stop_rules=[at_eos(eos), at_length()])


def batches(lengths: Sequence[int], target: Target, size: int) -> list[list[int]]:
    """Indices in batches of similar lengths; one a batch where rows cannot share a forward."""
    if size < 1:
        raise InputError(f"the batch size is {size}; expected 1 or more.")
    size = 1 if target.batch_refusal else size
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[first : first + size] for first in range(0, len(order), size)]
