"""Runs the reference loop on token ids."""

from __future__ import annotations

from domino_spec.decoding import RunStats, SamplingParams, Sequence, decode
from domino_spec.decoding.stopping import at_eos, at_length


def make_sequences(
    prompts, params: SamplingParams, *, eos=(), first=0, **options
) -> list[Sequence]:
    """A sequence for each prompt, with indices from `first`; `options` go to each of them."""
    rules = [at_length()] if not eos else [at_eos(eos), at_length()]
    return [
        Sequence(prompt, params, index=index, stop_rules=rules, eos=eos, **options)
        for index, prompt in enumerate(prompts, start=first)
    ]


def run(target, proposer, prompts, *, eos=(), **params):
    """Output tokens of every sequence, and the run's statistics."""
    sequences = make_sequences(prompts, SamplingParams(**params), eos=eos)
    stats = RunStats()
    for _ in decode(target, proposer, sequences, stats):
        pass
    return [sequence.output for sequence in sequences], stats
