"""The engine: rows come into slots, all advance a cycle at a time, and leave when they like."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from domino_spec.decoding import Commit, Row, RunStats, SamplingParams
from domino_spec.decoding.sampling import row_seed
from domino_spec.drafter import Drafter
from domino_spec.errors import InputError
from domino_spec.fast.admission import PREFILL_CHUNK, Admission
from domino_spec.fast.checks import check_row, check_settings
from domino_spec.fast.cycle import Cycle, Plan
from domino_spec.fast.draft import LeanDrafter
from domino_spec.fast.graphs import Runner
from domino_spec.fast.kernels.runtime import on_device
from domino_spec.fast.policy import Batch, DepthPolicy, depths
from domino_spec.fast.reading import PromptReader
from domino_spec.fast.seating import Seating
from domino_spec.fast.seats import Flight, Seat, Turn
from domino_spec.fast.slots import Slots
from domino_spec.fast.target import LeanTarget
from domino_spec.targets import Target


class Engine:
    """The fast path of decoding: the reference loop's results, at the speed of the memory."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        slots: int = 8,
        capacity: int = 4096,
        depth: int | None = None,
        candidates: int | None = None,
        graphs: bool | None = None,
        ahead: bool | None = None,
        pack: bool | None = None,
        reuse: bool = False,
    ) -> None:
        """`capacity` is tokens a slot, prompt and answer; `depth` drafts a cycle.

        `graphs` captures cycles in CUDA graphs; `ahead` starts the next cycle before the last
        one's report is read. Both are on where there is a GPU. `pack` keeps a copy of the weights
        in the order in which a CPU multiplies fastest; it is on where there is none.
        `reuse` remembers what lies in the slots: a prompt that begins as some other row's text did
        is read from where they part.
        """
        check_settings(
            drafter,
            target.device,
            slots=slots,
            capacity=capacity,
            depth=depth,
            candidates=candidates,
            graphs=graphs,
        )
        on_gpu = target.device.type == "cuda"
        self.depth = 0
        if drafter is not None:
            self.depth = drafter.config.default_depth if depth is None else depth
        # A row may run a block past its end, and another one started ahead of its report.
        self.margin = 2 * (self.depth + 1) + (drafter.config.block_size if drafter else 0)
        sizes = {"slots": slots + 1, "capacity": capacity + self.margin}
        self.packs = not on_gpu if pack is None else pack
        self.capacity = capacity
        self.target = LeanTarget(target, **sizes, pack=self.packs)
        self.drafter = (
            LeanDrafter(drafter, self.target, **sizes, candidates=candidates, pack=self.packs)
            if drafter is not None
            else None
        )
        self._graphs = on_gpu if graphs is None else graphs
        self.ahead = on_gpu if ahead is None else ahead
        self.policy: DepthPolicy | None = None
        """Chooses the depth of each cycle; None always takes `depth`."""
        self._speculates = drafter is not None
        self._reuse = reuse
        self._seat_rows(slots)

    def _seat_rows(self, slots: int) -> None:
        self.slots = Slots(slots, self.target.lm_head.shape[0], self.target.device)
        self.cycle = Cycle(self.target, self.drafter, self.slots)
        self.runner = Runner(self.cycle, graphs=self._graphs)
        self.reader = PromptReader(
            self.target,
            self.drafter,
            spare=self.slots.spare,
            recorder=self.runner.recorder if self._graphs else None,
        )
        self._seating = Seating(slots, reuse=self._reuse)
        self._flights: deque[Flight] = deque()

    @property
    def speculates(self) -> bool:
        """Whether drafts are made; an idle engine may be told not to, and back again."""
        return self._speculates

    @speculates.setter
    def speculates(self, wanted: bool) -> None:
        self._check_idle("their drafter knows nothing of other rows' tokens")
        wanted = wanted and self.drafter is not None
        if wanted != self._speculates:
            self.forget()  # the drafter knows of either all of a slot's tokens or none
        self._speculates = wanted

    def resize(self, *, slots: int, capacity: int) -> None:
        """Other slots for an idle engine: weights stay where they are, graphs are captured anew."""
        self._check_idle("their tokens would be lost")
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # a cycle nobody waited for may still run
        self._drop_slots()  # all of them, before anything is taken
        try:
            self.target.resize(slots=slots + 1, capacity=capacity + self.margin)
            if self.drafter is not None:
                self.drafter.resize(slots=slots + 1, capacity=capacity + self.margin)
        except BaseException:
            self._drop_slots()
            raise
        self._seat_rows(slots)
        self.capacity = capacity

    def _drop_slots(self) -> None:
        self._seat_rows(0)
        self.target.cache.free()
        if self.drafter is not None:
            self.drafter.cache.free()

    def restart(self) -> None:
        """After a cycle that failed: rows and cycles under way are lost, all slots are empty."""
        slots = self.slots.count
        self._seat_rows(0)
        self.resize(slots=slots, capacity=self.capacity)

    def twin(self, *, slots: int, capacity: int, reuse: bool | None = None) -> Engine:
        """Another engine over the same weights, with slots of its own."""
        other = copy.copy(self)
        other._reuse = self._reuse if reuse is None else reuse
        other.capacity = capacity
        sizes = {"slots": slots + 1, "capacity": capacity + self.margin}
        other.target = self.target.twin(**sizes)
        if self.drafter is not None:
            other.drafter = self.drafter.twin(other.target, **sizes)
        other._seat_rows(slots)
        return other

    def _check_idle(self, why: str) -> None:
        if self.busy:
            raise InputError(f"{self.running} rows are running; {why}. Wait for them to end.")

    @property
    def running(self) -> int:
        """Rows in slots, those still being admitted among them."""
        return len(self._seating.seats)

    @property
    def busy(self) -> bool:
        """Whether a row is in a slot, or a cycle's report is still to come."""
        return bool(self._seating.seats or self._flights)

    @property
    def free(self) -> int:
        """Slots without a row."""
        return len(self._seating.free)

    def forget(self) -> None:
        """Reuse nothing of what rows that left have read; for those who write into slots."""
        self._seating.forget()

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
