"""Decodes many prompts: on the engine where it can run them, else in the reference loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import check_prompt
from domino_spec.decoding import AcceptanceStats, Drafter, RunStats, SamplingParams, SequenceOutput
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stopping import at_eos, at_length
from domino_spec.engine.models import unsupported_reason
from domino_spec.errors import InputError
from domino_spec.targets import Target

Progress = Callable[[int, int], None]
"""Called with how many answers of how many are done."""


def decode_prompts(
    decoder: DominoDecoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    batch_size: int,
    eos: Collection[int] | None = None,
    stats: RunStats | None = None,
    on_progress: Progress | None = None,
) -> list[Decoded]:
    """Every prompt's sequence, in order, decoded. Prompt i draws from seed + i whatever its batch.

    The engine schedules all at once; `batch_size` is that of the reference loop.
    """
    target, stats = decoder.target, RunStats() if stats is None else stats
    for prompt in prompts:
        check_prompt(prompt, params.max_new_tokens, target)
    eos = decoder.eos_token_ids if eos is None else eos
    sequences = [make_sequence(i, prompt, params, eos=eos) for i, prompt in enumerate(prompts)]
    groups = batches([len(prompt) for prompt in prompts], target, batch_size)
    outputs: Iterable[SequenceOutput] = decoder.run(sequences, stats)
    if stats.engine != "fast":
        runs = (decoder.run([sequences[index] for index in group], stats) for group in groups)
        outputs = chain.from_iterable(runs)
    done = 0
    for output in outputs:
        done += output.finish_reason is not None
        if on_progress is not None and output.finish_reason is not None:
            on_progress(done, len(sequences))
    return sequences


def greedy_counts(
    decoder: DominoDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> AcceptanceStats:
    """The counts of all prompts together, decoded greedily: for drafters without a simulation."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    answers = decode_prompts(decoder, prompts, params, batch_size=batch_size)
    return AcceptanceStats.sum(answer.stats for answer in answers)


def make_sequence(
    index: int, prompt: Sequence[int], params: SamplingParams, *, eos: Collection[int]
) -> Decoded:
    """A sequence that draws from the seed and its own number, whatever its batch."""
    return Decoded(prompt, params, index=index, stop_rules=[at_eos(eos), at_length()], eos=eos)


def batches(lengths: Sequence[int], target: Target, size: int) -> list[list[int]]:
    """Indices in batches of similar lengths; one a batch where sequences cannot share a forward."""
    if size < 1:
        raise InputError(f"the batch size is {size}; expected 1 or more.")
    size = 1 if target.batch_refusal else size
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[first : first + size] for first in range(0, len(order), size)]


def unsupported_by_engine(target: Target, drafter: Drafter) -> str | None:
    """What keeps it off the engine, in words; None if nothing does."""
    reason = unsupported_reason(target)
    if reason is not None:
        return f"as for the target, {reason}"
    reason = drafter.unsupported_reason(target.device)
    return None if reason is None else f"as for {drafter.name}, {reason}"
