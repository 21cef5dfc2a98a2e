"""Runs the engine and the reference loop on the same prompts, writing down what each drafts."""

from __future__ import annotations

import copy

import torch

from domino_spec.decoding import DominoProposer, NoDrafts, RowStats, SamplingParams
from domino_spec.drafter import Drafter
from domino_spec.engine.engine import Engine
from domino_spec.engine.sources import AnySource
from domino_spec.targets import Target
from tests.support.runs import make_rows, run

Blocks = set[tuple[int, ...]]
"""Where each block stood (tokens before its anchor), its anchor and its drafts."""


def run_reference(target: Target, drafter: Drafter | None, prompts, *, depth, candidates, **params):
    """Tokens, counts and drafts of the reference loop."""
    blocks: Blocks = set()
    proposer = NoDrafts()
    if drafter is not None:
        depth = drafter.config.default_depth if depth is None else depth
        proposer = DominoProposer(drafter, target, depth=depth, candidates=candidates)
        plain = proposer.propose

        def propose(rows, asked):
            made = plain(rows, asked)
            for row, drafts in zip(rows, made.tokens.tolist(), strict=True):
                before = len(row.prompt) + len(row.generated) - 1
                blocks.add((before, row.anchor, *drafts))
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


def run_engine(engine: Engine, prompts, *, eos=(), seeds=None, params=None, **common):
    """Tokens, counts and drafts of the engine."""
    blocks = watch(engine)
    per_row = params or [SamplingParams(**common)] * len(prompts)
    rows = [
        make_rows(engine.slots, [prompt], each, eos=eos)[0]
        for prompt, each in zip(prompts, per_row, strict=True)
    ]
    seeds = seeds or [0] * len(rows)
    for _ in engine.run(list(zip(rows, per_row, seeds, strict=True))):
        pass
    counts = RowStats()
    for row in rows:
        counts.add(row.stats)
    return [row.generated for row in rows], counts, blocks


def make_engine(target: Target, drafter: AnySource | None, **options) -> Engine:
    """An engine on copies, since it joins weights."""
    return Engine(own(target), copy.deepcopy(drafter), **{"capacity": 192, **options})


def own(target: Target) -> Target:
    """A copy of a target with what its probe found."""
    fresh = Target(copy.deepcopy(target.model), name=target.name)
    fresh.embedding_scale = target.embedding_scale
    fresh.logit_scale, fresh.logit_softcap = target.logit_scale, target.logit_softcap
    return fresh


def script(engine: Engine, answers: list[list[int]]) -> None:
    """Let the engine draft each row's known answer, right four times in five."""
    vocabulary = engine.target.vocab_size

    def propose(_anchors, rows, depth, _draws):
        seated = {seat.slot: seat.row for seat in engine._seating.seats}
        drafts = []
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            row = seated.get(slot)  # gone, where a cycle was started ahead
            done = 0 if row is None else start + 1 - len(row.prompt)
            known = [] if row is None else answers[row.index][done : done + depth]
            known = known + [0] * (depth - len(known))
            drafts.append([
                token if (done * 31 + place * 17) % 5 else (token + 1) % vocabulary
                for place, token in enumerate(known)
            ])  # fmt: skip
        return torch.tensor(drafts)

    engine.drafter.propose = propose
