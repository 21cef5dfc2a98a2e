"""A row in its slot, a cycle under way for some of them, and what a turn of the engine gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from domino_spec.decoding import Commit, Row, RunStats, SamplingParams, TokenScore
from domino_spec.decoding.loop import offered
from domino_spec.fast.cycle import Plan
from domino_spec.fast.scores import ScoreTable

Report = tuple[int, list[int], tuple[TokenScore, ...] | None]
"""How many drafts were accepted, the tokens to commit, and their scores if they are wanted."""


@dataclass
class Seat:
    """A row in its slot."""

    slot: int
    row: Row
    params: SamplingParams
    run: RunStats | None = None
    """Where its cycles are counted, besides the row's own counts."""
    source: int = 0
    """The slot in which the first `reused` tokens of its prompt lay; it may be its own."""
    reused: int = 0
    read: int = 0
    """Tokens of its prompt that are in the caches."""
    cycles: int = 0
    left: bool = False
    """Whether the row has gone; a cycle started before may still report on it."""

    @property
    def reading(self) -> bool:
        """Whether it is still being admitted: it has no token of its own yet."""
        return not self.row.generated

    @property
    def known(self) -> list[int]:
        """The tokens whose states are in the caches for certain.

        The anchor's are not there yet. What a cycle under way writes comes behind these.
        """
        return self.row.prompt[: self.read] + self.row.generated[:-1]

    def take(self, report: Report) -> Commit:
        """Commit what was chosen, up to the row's end."""
        accepted, tokens, scores = report
        taken = self.row.take(tokens)
        return Commit(
            self.row.index,
            taken,
            min(accepted, len(taken)),
            self.cycles,
            self.row.finish_reason,
            None if scores is None else scores[: len(taken)],
        )

    def end_cycle(self, report: Report, depth: int) -> Commit:
        """The same of one cycle that verified `depth` drafts, and count it."""
        self.cycles += 1
        commit = self.take(report)
        kept = {"accepted": commit.accepted, "committed": len(commit.tokens)}
        drafts = offered(self.row, commit, depth)
        self.row.stats.record(drafts=drafts, **kept)
        if self.run is not None:
            self.run.rows.record(drafts=drafts, **kept)
        return commit


@dataclass(frozen=True)
class Flight:
    """A cycle that was started: for whom, and its report to come."""

    seats: tuple[Seat, ...]
    plan: Plan
    report: Callable[[], Tensor]

    def land(self) -> Iterator[tuple[Seat, Report]]:
        """Wait for the report: what each row that is still there may commit."""
        report, places = self.report(), self.plan.depth + 1
        table = ScoreTable(report[:, places + 1 :], places) if self.plan.scored else None
        chosen = report[:, : places + 1].tolist()
        for index, (seat, (accepted, *tokens)) in enumerate(zip(self.seats, chosen, strict=True)):
            if seat.left:
                continue
            kept, top = tokens[: accepted + 1], seat.params.logprobs
            scores = None
            if table is not None and top is not None:
                scores = table.of(index, tokens=len(kept), top=top)
            yield seat, (accepted, kept, scores)


@dataclass(frozen=True)
class Turn:
    """What one turn of the engine gave: a commit a row, or why a row had to go."""

    commits: list[Commit]
    failures: list[tuple[Row, Exception]]
    """Rows whose own rules raised; they have left their slots."""
