"""Decodes many prompts: on the engine where nothing drafts, else in the reference loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from domino_spec.api.prompts import check_prompt
from domino_spec.baselines import PLAIN
from domino_spec.decoding import (
    NoDrafts,
    Proposer,
    RowStats,
    SamplingParams,
    SequenceOutput,
    decode,
)
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stopping import at_eos, at_length
from domino_spec.engine.engine import Engine
from domino_spec.engine.families import unsupported_reason
from domino_spec.engine.sources import AnySource, as_maker
from domino_spec.errors import InputError
from domino_spec.targets import Target


@dataclass(frozen=True)
class Answer:
    """What one prompt gave: its tokens, the prefill's first, and the counts of its cycles."""

    tokens: tuple[int, ...]
    stats: RowStats


Progress = Callable[[int, int], None]
"""Told how many answers of how many are done."""


def decode_prompts(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    eos: Collection[int],
    batch_size: int,
    on_progress: Progress | None = None,
) -> list[Answer]:
    """Every prompt's answer, in order. Prompt i draws from seed + i whatever its batch.

    Without drafts the engine runs all at once, where it can run the target.
    """
    for prompt in prompts:
        check_prompt(prompt, params.max_new_tokens, target)
    sequences = [make_sequence(i, prompt, params, eos=eos) for i, prompt in enumerate(prompts)]
    done = 0
    for output in _outputs(target, proposer, sequences, batch_size):
        if output.error is not None:
            raise output.error
        done += output.finish_reason is not None
        if on_progress is not None and output.finish_reason is not None:
            on_progress(done, len(sequences))
    return [Answer(tuple(sequence.output), sequence.stats) for sequence in sequences]


def _outputs(
    target: Target, proposer: Proposer, sequences: Sequence[Decoded], batch_size: int
) -> Iterator[SequenceOutput]:
    plain = isinstance(proposer, NoDrafts) and unsupported_reason(target) is None
    # Draws of the reference loop's rules come from a generator: a seed's text would be another.
    same = all(not s.params.samples or s.params.accept == "coupled" for s in sequences)
    if plain and same and not any(s.params.processors for s in sequences):
        yield from Engine(target).stream(sequences)
        return
    for batch in batches([len(sequence.prompt) for sequence in sequences], target, batch_size):
        yield from decode(target, proposer, [sequences[index] for index in batch])


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


def unsupported_by_engine(
    target: Target, *, name: str, kind: str, source: AnySource | None
) -> str | None:
    """What keeps it off the engine, in words; None if nothing does."""
    reason = unsupported_reason(target)
    if reason is not None:
        return f"as for the target, {reason}"
    if source is not None:
        reason = as_maker(source).why_not(target.device)
        return None if reason is None else f"as for {name}, {reason}"
    return None if kind == PLAIN else f"the engine does not run {name} ({kind})"
