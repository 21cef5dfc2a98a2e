"""Runs the engine and the reference loop on the same prompts, writing down what each drafts."""

from __future__ import annotations

import copy

import torch

from domino_spec.decoding import DominoProposer, NoDrafts, RowStats, SamplingParams, Sequence
from domino_spec.drafter import Drafter
from domino_spec.engine.engine import Engine
from domino_spec.engine.sources import AnySource
from domino_spec.targets import Target
from tests.support.runs import make_sequences, run

Blocks = set[tuple[int, ...]]
"""Where each block stood (tokens before its anchor), its anchor and its drafts."""


def run_reference(
    target: Target, drafter: Drafter | None, prompts, *, depth=None, candidates=None, **params
):
    """Tokens, counts and drafts of the reference loop."""
    blocks: Blocks = set()
    proposer = NoDrafts()
    if drafter is not None:
        depth = drafter.config.default_depth if depth is None else depth
        proposer = DominoProposer(drafter, target, depth=depth, candidates=candidates)
        plain = proposer.propose

        def propose(sequences, asked):
            made = plain(sequences, asked)
            for sequence, drafts in zip(sequences, made.tokens.tolist(), strict=True):
                before = len(sequence.prompt) + len(sequence.output) - 1
                blocks.add((before, sequence.anchor, *drafts))
            return made

        proposer.propose = propose
    tokens, stats = run(target, proposer, prompts, **params)
    return tokens, stats.rows, blocks


def watch(engine: Engine) -> Blocks:
    """What the engine drafts from now on."""
    blocks: Blocks = set()
    if engine.drafter is not None:
        plain = type(engine.drafter).propose

        def propose(anchors, rows, depth, draws):
            drafts = plain(engine.drafter, anchors, rows, depth, draws)
            lists = (rows.starts.tolist(), anchors.tolist(), drafts.tolist())
            blocks.update((s, a, *d) for s, a, d in zip(*lists, strict=True))
            return drafts

        engine.drafter.propose = propose
    return blocks


def make_requests(prompts, *, eos=(), seeds=None, params=None, **common) -> list[Sequence]:
    """A sequence for each prompt; `params` and `seeds` are each one's own."""
    params = params or [SamplingParams(**common)] * len(prompts)
    seeds = seeds or [None] * len(prompts)
    made = []
    for index, (prompt, own, seed) in enumerate(zip(prompts, params, seeds, strict=True)):
        made += make_sequences([prompt], own, eos=eos, seed=seed, first=index)
    return made


def run_engine(engine: Engine, prompts, **wanted):
    """Tokens, counts and drafts of the engine."""
    blocks = watch(engine)
    sequences = make_requests(prompts, **wanted)
    for output in engine.stream(sequences):
        if output.error is not None:
            raise output.error
    counts = RowStats()
    for sequence in sequences:
        counts.add(sequence.stats)
    return [sequence.output for sequence in sequences], counts, blocks


def finish(engine: Engine) -> list:
    """Steps until nothing is left to do; all outputs."""
    outputs = []
    while engine.busy:
        outputs += engine.step()
    return outputs


def make_engine(target: Target, drafter: AnySource | None, **options) -> Engine:
    """An engine on copies, since it joins weights."""
    return Engine(own(target), copy.deepcopy(drafter), **{"slots": 8, "capacity": 192, **options})


def own(target: Target) -> Target:
    """A copy of a target with what its probe found."""
    fresh = Target(copy.deepcopy(target.model), name=target.name)
    fresh.embedding_scale = target.embedding_scale
    fresh.logit_scale, fresh.logit_softcap = target.logit_scale, target.logit_softcap
    return fresh


def script(engine: Engine, answers: list[list[int]]) -> None:
    """Let the engine draft each sequence's known answer, right four times in five."""
    vocabulary = engine.target.vocab_size

    def propose(_anchors, rows, depth, _draws):
        running = {sequence.slot: sequence for sequence in engine.scheduler.running}
        drafts = []
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            sequence = running.get(slot)  # gone, where a cycle was started ahead
            done = 0 if sequence is None else start + 1 - len(sequence.prompt)
            known = [] if sequence is None else answers[sequence.index][done : done + depth]
            known = known + [0] * (depth - len(known))
            drafts.append([
                token if (done * 31 + place * 17) % 5 else (token + 1) % vocabulary
                for place, token in enumerate(known)
            ])  # fmt: skip
        return torch.tensor(drafts)

    engine.drafter.propose = propose
