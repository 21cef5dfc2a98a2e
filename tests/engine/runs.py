"""Runs the engine and the reference loop on the same prompts, writing down what each drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from domino_spec.decoding import AcceptanceStats, Drafter, SamplingParams, Sequence
from domino_spec.drafters import drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.targets import Target
from tests.support.runs import make_sequences, run

Device = torch.device | None

Blocks = set[tuple[int, ...]]
"""Where each block stood (tokens before its anchor), its anchor and its drafts."""


def run_reference(target: Target, drafter, prompts, *, depth=None, candidates=None, **params):
    """Tokens, counts and drafts of the reference loop."""
    if drafter is None:
        params["eos"] = frozenset(params.get("eos", ()))
        found = run_plain(target, tuple(map(tuple, prompts)), tuple(params.items()))
        tokens, stats = copy.deepcopy(found)
        return tokens, stats.acceptance, set()
    drafter = opened(drafter, candidates=candidates).with_depth(depth)
    blocks = watch_drafter(drafter)
    tokens, stats = run(target, drafter, prompts, **params)
    return tokens, stats.acceptance, blocks


@cache
def run_plain(target: Target, prompts, params):
    """Many tests ask for the same text."""
    return run(target, None, [list(prompt) for prompt in prompts], **dict(params))


def opened(drafter, *, candidates=None) -> Drafter:
    """A drafter, or that of a model."""
    return drafter if isinstance(drafter, Drafter) else drafter_of(drafter, candidates=candidates)


def watch_drafter(drafter: Drafter) -> Blocks:
    """What it drafts from now on, bound or to be bound."""
    blocks: Blocks = set()

    class Watched(type(drafter)):
        def propose(self, anchors, *, starts, **options):
            drafts = super().propose(anchors, starts=starts, **options)
            lists = (starts.tolist(), anchors.tolist(), drafts.tolist())
            blocks.update((s, a, *d) for s, a, d in zip(*lists, strict=True))
            return drafts

    drafter.__class__ = Watched
    return blocks


def watch(engine: Engine) -> Blocks:
    """What the engine drafts from now on."""
    return set() if engine.drafter is None else watch_drafter(engine.drafter)


def make_requests(prompts, *, eos=(), seeds=None, params=None, **common) -> list[Sequence]:
    """A sequence for each prompt; `params` and `seeds` are each one's own."""
    params = params or [SamplingParams(**common)] * len(prompts)
    seeds = seeds or [None] * len(prompts)
    made = []
    for index, (prompt, own, seed) in enumerate(zip(prompts, params, seeds, strict=True)):
        if seed is not None and own.accept is None:
            own = replace(own, accept="coupled")  # a seed keeps its text
        made += make_sequences([prompt], own, eos=eos, seed=seed, first=index)
    return made


def run_engine(engine: Engine, prompts, **wanted):
    """Tokens, counts and drafts of the engine."""
    blocks = watch(engine)
    sequences = make_requests(prompts, **wanted)
    for output in engine.stream(sequences):
        if output.error is not None:
            raise output.error
    counts = AcceptanceStats()
    for sequence in sequences:
        counts.add(sequence.stats)
    return [sequence.output for sequence in sequences], counts, blocks


def finish(engine: Engine) -> list:
    """Steps until nothing is left to do; all outputs."""
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return outputs


def make_engine(
    target: Target, drafter=None, *, candidates=None, device: Device = None, **options
) -> Engine:
    """An engine on copies, since it joins weights; a drafter may be given as its model."""
    if drafter is not None:
        drafter = copy.deepcopy(drafter)
        drafter = opened(drafter if device is None else drafter.to(device), candidates=candidates)
    return Engine(own(target, device), drafter, **{"slots": 8, "capacity": 192, **options})


def own(target: Target, device: Device = None) -> Target:
    """A copy of a target with what its probe found, on another device where one is named."""
    model = copy.deepcopy(target.model)
    fresh = Target(model if device is None else model.to(device), name=target.name)
    fresh.embedding_scale = target.embedding_scale
    fresh.logit_scale, fresh.logit_softcap = target.logit_scale, target.logit_softcap
    return fresh


def draft(engine: Engine, drafts_of: Callable[[int, int], list[int]]) -> None:
    """Let the engine draft what `drafts_of` gives for a sequence's index and tokens so far.

    It looks at the scheduler, which no graph could: make the engine without.
    """

    def propose(_anchors, *, slots, starts, depth, sampler):
        running = {sequence.slot: sequence for sequence in engine.scheduler.running}
        found = []
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            sequence = running.get(slot)  # gone, where a cycle was started ahead
            done = 0 if sequence is None else start + 1 - len(sequence.prompt)
            drafts = [] if sequence is None else drafts_of(sequence.index, done)[:depth]
            found.append(drafts + [0] * (depth - len(drafts)))
        return torch.tensor(found, device=engine.target.device)

    engine.drafter.propose = propose


def script(engine: Engine, answers: list[list[int]]) -> None:
    """Let the engine draft each sequence's known answer, right four times in five."""
    vocabulary = engine.target.vocab_size

    def drafts_of(index, done):
        return [
            token if (done * 31 + place * 17) % 5 else (token + 1) % vocabulary
            for place, token in enumerate(answers[index][done:])
        ]

    draft(engine, drafts_of)
