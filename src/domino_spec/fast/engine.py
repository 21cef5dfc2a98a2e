"""The engine: rows come into slots, all advance a cycle at a time, and leave when they like."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace

from domino_spec.decoding import Commit, Row, RunStats, SamplingParams
from domino_spec.decoding.sampling import row_seed
from domino_spec.errors import InputError
from domino_spec.fast.admission import PREFILL_CHUNK, Admission
from domino_spec.fast.checks import check_row
from domino_spec.fast.cycle import Plan
from domino_spec.fast.kernels.runtime import on_device
from domino_spec.fast.policy import Batch, depths
from domino_spec.fast.room import EngineRoom
from domino_spec.fast.seats import Flight, Seat, Turn


class Engine(EngineRoom):
    """The fast path of decoding: the reference loop's results, at the speed of the memory."""

    def begin(
        self,
        row: Row,
        params: SamplingParams,
        *,
        seed: int | None = None,
        stats: RunStats | None = None,
        chunk: int = PREFILL_CHUNK,
        reuse: bool = True,
    ) -> Admission:
        """Take a slot for a row; each `advance` of what is returned reads a chunk of its prompt.

        A row that samples draws from `seed`; None takes the parameters' own, or a fresh one.
        Without `reuse` all of the prompt is read, whatever lies in the slots.
        """
        size = {"capacity": self.capacity, "vocab_size": self.target.vocab_size}
        check_row(row, params, **size, chunk=chunk)
        if any(seat.row is row for seat in self._seating.seats):
            raise InputError("the row is being admitted already; advance that admission.")
        if not self.free:
            raise InputError(f"all {self.slots.count} slots are taken; wait for a row to end.")
        if seed is None:
            seed = row_seed(params, row=row.index)
        seat = self._seating.take(row, params, stats, reuse=reuse)
        try:
            admission = Admission(
                seat,
                reader=self.reader,
                observed=self.speculates,
                slots=self.slots,
                seed=seed,
                chunk=chunk,
                release=self.release,
            )
            with on_device(self.target.device):
                admission.reuse()
        except BaseException:
            self.release(row)
            raise
        return admission

    def admit(
        self,
        row: Row,
        params: SamplingParams,
        *,
        seed: int | None = None,
        stats: RunStats | None = None,
    ) -> Commit:
        """Read a row's whole prompt into a slot and choose its first token."""
        return self.begin(row, params, seed=seed, stats=stats).finish()

    def advance(self) -> Turn:
        """Start a cycle and read a report: the same one's, or the last one's when ahead.

        A row whose own rules raise leaves; all others keep what they committed.
        """
        seats = self._seating.decoding
        if seats:
            self._start(seats)
        if not self._flights or (self.ahead and len(self._flights) < 2 and seats):
            return Turn([], [])
        return self._land(self._flights.popleft())

    def land(self) -> Turn:
        """Read all reports that are still to come and start nothing."""
        turn = Turn([], [])
        while self._flights:
            landed = self._land(self._flights.popleft())
            turn.commits.extend(landed.commits)
            turn.failures.extend(landed.failures)
        return turn

    def step(self) -> list[Commit]:
        """The same where a row that fails is an error."""
        turn = self.advance()
        if turn.failures:
            raise turn.failures[0][1]
        return turn.commits

    def capture(self, rows: int, params: SamplingParams) -> None:
        """Record all that up to so many such rows could need, where graphs are on.

        Otherwise each is recorded at its first use, inside somebody's answer.
        """
        self.reader.capture(observed=self.speculates)
        chosen = (self.depth,) if self.policy is None else depths(self.depth)
        for depth in chosen:
            self.runner.capture_up_to(rows, self._plan([params], depth))

    def _start(self, seats: tuple[Seat, ...]) -> None:
        plan = self._plan([seat.params for seat in seats], self.depth)
        if self.policy is not None and self.speculates:
            drawn = sum(seat.params.samples for seat in seats) / len(seats)
            batch = Batch(self.runner.size_of(len(seats)), plan.kinds, drawn)
            plan = replace(plan, depth=self.policy.choose(batch))
        report = self.runner.start([seat.slot for seat in seats], plan)
        self._flights.append(Flight(seats, plan, report))

    def _plan(self, params: Sequence[SamplingParams], depth: int) -> Plan:
        alone = self.drafter is not None and not self.speculates
        return Plan.of(params, 0 if alone else depth, alone=alone)

    def _land(self, flight: Flight) -> Turn:
        turn = Turn([], [])
        depth = flight.plan.depth
        for seat, report in flight.land():
            if seat.row.finish_reason is not None:
                self.release(seat.row)  # somebody else ended it
                continue
            if self.policy is not None and depth:
                self.policy.observe(report[0], depth, sampled=seat.params.samples)
            try:
                turn.commits.append(seat.end_cycle(report, depth))
            except Exception as error:
                self.release(seat.row)
                turn.failures.append((seat.row, error))
            if seat.row.finish_reason is not None:
                self.release(seat.row)
        return turn

    def release(self, row: Row) -> None:
        """Give a row's slot back, whether it has ended, decodes or is still being admitted."""
        self._seating.leave(row)

    def run(
        self,
        rows: Sequence[tuple[Row, SamplingParams, int | None]],
        stats: RunStats | None = None,
    ) -> Generator[Commit, None, None]:
        """Decode all rows (each with parameters and a seed), as many at a time as there are slots.

        Who stops listening takes the rows out.
        """
        stats = RunStats() if stats is None else stats
        stats.engine = "fast"
        waiting = deque(rows)
        try:
            while waiting or self.busy:
                while waiting and self.free:
                    row, params, seed = waiting.popleft()
                    with stats.clocked("prefill"):
                        first = self.admit(row, params, seed=seed, stats=stats)
                    yield first
                with stats.clocked("whole"):
                    commits = self.step()
                yield from commits
        finally:
            for row, _, _ in rows:
                self.release(row)
            if not self._seating.seats:
                self._flights.clear()  # nobody is left to hear of them
