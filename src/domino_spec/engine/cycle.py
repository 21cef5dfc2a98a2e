"""One cycle, whole on the device: draft, verify, accept, commit. Nothing waits for the host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.kernels.commit import commit
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import Draws, needs_filter
from domino_spec.engine.scores import score_columns
from domino_spec.engine.side_stream import SideStream
from domino_spec.engine.slots import Slots
from domino_spec.engine.sources import Source
from domino_spec.errors import InputError

LONGEST_PATTERN = 1024
KINDS = ("sampled", "filtered", "penalised", "scored", "ranked")
"""What of a plan adds work for every token that a cycle verifies."""


@dataclass(frozen=True)
class Plan:
    """What kind of cycle it is; each kind is captured once."""

    depth: int
    """Drafts verified; 0 is plain decoding."""
    sampled: bool = False
    """Whether some row draws its tokens."""
    filtered: bool = False
    """Whether some row cuts tokens off before it draws."""
    penalised: bool = False
    """Whether some row pays for tokens it repeats."""
    scored: bool = False
    """Whether some row wants to know how likely its tokens were."""
    ranked: bool = False
    """Whether some row wants to know the likeliest tokens too."""
    alone: bool = False
    """Whether these rows will never draft: the drafter is told nothing of their tokens."""
    forced: bool = False
    """Whether acceptance is pretended (benchmarks only)."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], depth: int, *, alone: bool) -> Plan:
        """What rows with these parameters need."""
        sampled = any(each.samples for each in params)
        filtered = any(needs_filter(each) for each in params)
        return cls(
            depth,
            sampled=sampled,
            filtered=filtered,
            penalised=any(each.penalises for each in params),
            scored=any(each.logprobs is not None for each in params),
            ranked=any(each.logprobs for each in params),
            alone=alone,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of `KINDS` that it is of."""
        return tuple(kind for kind in KINDS if getattr(self, kind))


class Cycle:
    """Target, drafter and slots, and what one turn does to them."""

    def __init__(self, target: InferenceModel, drafter: Source | None, slots: Slots) -> None:
        self.target = target
        self.drafter = drafter
        self.slots = slots
        self._beside = SideStream(slots.device)
        # In place for ever: a captured graph keeps their addresses.
        self._pattern = torch.zeros(LONGEST_PATTERN, dtype=torch.long, device=slots.device)
        self._period = torch.ones(1, dtype=torch.long, device=slots.device)
        self._turn = torch.zeros(1, dtype=torch.long, device=slots.device)
        self.clock: dict[str, float] | None = None
        """Seconds of `draft` and `verify` are added here. For CPUs: elsewhere nobody waits."""

    def force(self, accepted: Sequence[int]) -> None:
        """What cycles whose plan says `forced` pretend to accept, one after the other."""
        if not 0 < len(accepted) <= LONGEST_PATTERN:
            raise InputError(
                f"the pattern has {len(accepted)} cycles; expected 1 to {LONGEST_PATTERN}."
            )
        self._pattern[: len(accepted)] = torch.tensor(list(accepted), device=self.slots.device)
        self._period.fill_(len(accepted))
        self._turn.zero_()

    @torch.no_grad()
    def run(self, slots: Tensor, plan: Plan) -> Tensor:
        """For each row how many drafts were accepted, then the tokens chosen: [rows, depth + 2].

        The first `accepted + 1` of the tokens are committed. If they are scored, columns of
        `score_columns` follow.
        """
        state = self.slots
        starts, anchors = state.lengths[slots], state.anchors[slots]
        draws = state.draws(slots, sampled=plan.sampled, filtered=plan.filtered)
        rows = AttentionMetadata(slots, starts, plan.depth + 1)
        block = anchors.unsqueeze(1)
        if plan.depth:
            assert self.drafter is not None
            with self._timed("draft"):
                drafts = self.drafter.propose(anchors, rows, plan.depth, draws)
            block = torch.cat((block, drafts), dim=1)
        observer = None if plan.alone else self.drafter
        taps = () if observer is None else observer.taps
        with self._timed("verify"):
            states, tapped = self.target.forward(block, rows, taps)
        try:
            if observer is not None:
                with self._timed("draft"), self._beside.work():
                    observer.observe(tapped, block, rows)
            with self._timed("verify"):
                logits = self.target.logits(states).view(*block.shape, -1)
                chosen = self.choose(logits, block, rows, draws, plan)
        finally:
            self._beside.join()
        return self.report(chosen, logits, block, slots, plan)

    def choose(
        self, logits: Tensor, block: Tensor, rows: AttentionMetadata, draws: Draws, plan: Plan
    ) -> Tensor:
        """Tokens [rows, n] behind each of a block [rows, n], as its row chooses."""
        judged = logits
        if plan.penalised:
            judged = self.slots.penalties.apply(logits, rows.slots, block)
        return draws.choose(judged, rows.starts)

    def report(
        self, chosen: Tensor, logits: Tensor, block: Tensor, slots: Tensor, plan: Plan
    ) -> Tensor:
        """Accept and commit what was chosen behind a block; what `run` gives."""
        state = self.slots
        pretended = self._pretended(block) if plan.forced else None
        report = commit(chosen, block, slots, state.lengths, state.anchors, pretended)
        if plan.penalised:
            state.penalties.count(slots, block, report[:, 0])
        if not plan.scored:
            return report
        return torch.cat((report, score_columns(logits, chosen, ranked=plan.ranked)), dim=1)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.clock is not None:
            self.clock[part] = self.clock.get(part, 0.0) + time.perf_counter() - start

    def _pretended(self, block: Tensor) -> Tensor:
        """The next count of the pattern for every row, [rows]."""
        count = self._pattern.index_select(0, self._turn.remainder(self._period))
        self._turn.add_(1)
        return count.clamp(max=block.shape[1] - 1).repeat(len(block))
