"""Runs the reference loop on token ids."""

from __future__ import annotations

from domino_spec.decoding import Row, RunStats, SamplingParams, decode, make_sampler
from domino_spec.decoding.stopping import at_eos, at_length


def make_rows(target, prompts, params: SamplingParams, *, eos=()):
    rules = [at_length()] if not eos else [at_eos(eos), at_length()]
    return [
        Row(
            index,
            prompt,
            sampler=make_sampler(params, row=index, device=target.device),
            stop_rules=rules,
            max_new_tokens=params.max_new_tokens,
            device=target.device,
        )
        for index, prompt in enumerate(prompts)
    ]


def run(target, proposer, prompts, *, eos=(), **params):
    """Generated tokens of every row, and the run's statistics."""
    rows = make_rows(target, prompts, SamplingParams(**params), eos=eos)
    stats = RunStats()
    for _ in decode(target, proposer, rows, stats):
        pass
    return [row.generated for row in rows], stats
