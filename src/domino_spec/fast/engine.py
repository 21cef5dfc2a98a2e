"""The engine: rows come into slots, all advance a cycle at a time, and leave when they like."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_spec.decoding import Commit, Row, SamplingParams
from domino_spec.decoding.loop import offered
from domino_spec.decoding.sampling import row_seed
from domino_spec.drafter import Drafter
from domino_spec.errors import InputError
from domino_spec.fast.checks import check_row, check_settings
from domino_spec.fast.cycle import Cycle, Plan
from domino_spec.fast.draft import LeanDrafter
from domino_spec.fast.graphs import Runner
from domino_spec.fast.policy import DepthPolicy, depths
from domino_spec.fast.rows import Rows
from domino_spec.fast.sampling import needs_filter
from domino_spec.fast.slots import Slots
from domino_spec.fast.target import LeanTarget
from domino_spec.targets import Target

PREFILL_CHUNK = 2048


@dataclass
class Seat:
    """A row in its slot."""

    slot: int
    row: Row
    params: SamplingParams
    cycles: int = 0
    left: bool = False
    """Whether the row has gone; a cycle started before may still report on it."""


@dataclass(frozen=True)
class Flight:
    """A cycle that was started: for whom, and its report to come."""

    seats: tuple[Seat, ...]
    depth: int
    report: Callable[[], Tensor]


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
    ) -> None:
        """`capacity` is tokens a slot, prompt and answer; `depth` drafts a cycle.

        `graphs` captures cycles in CUDA graphs; `ahead` starts the next cycle before the last
        one's report is read. Both are on where there is a GPU. `pack` keeps a copy of the weights
        in the order in which a CPU multiplies fastest; it is on where there is none.
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
        self.slots = Slots(slots, target.device)
        self.cycle = Cycle(self.target, self.drafter, self.slots)
        self.runner = Runner(self.cycle, graphs=on_gpu if graphs is None else graphs)
        self.ahead = on_gpu if ahead is None else ahead
        self.policy: DepthPolicy | None = None
        """Chooses the depth of each cycle; None always takes `depth`."""
        self._free = list(range(slots))[::-1]
        self._seats: list[Seat] = []
        self._flights: deque[Flight] = deque()

    @property
    def running(self) -> int:
        """Rows in slots."""
        return len(self._seats)

    @property
    def busy(self) -> bool:
        """Whether a row is running, or a cycle's report is still to come."""
        return bool(self._seats or self._flights)

    @property
    def free(self) -> int:
        """Slots without a row."""
        return len(self._free)

    def admit(self, row: Row, params: SamplingParams, *, seed: int | None = None) -> Commit:
        """Read a row's prompt into a slot and choose its first token.

        A row that samples draws from `seed`; None takes the parameters' own, or a fresh one.
        """
        check_row(row, params, capacity=self.capacity, vocab_size=self.target.vocab_size)
        if not self._free:
            raise InputError(f"all {self.slots.count} slots are taken; wait for a row to end.")
        if seed is None:
            seed = row_seed(params, row=row.index)
        seat = Seat(self._free.pop(), row, params)
        self._seats.append(seat)
        try:
            with self._on_device():
                token = self._prefill(row, params, seat.slot, seed)
            return self._take(seat, [token], accepted=0)
        except BaseException:
            self.release(row)
            raise

    @torch.no_grad()
    def _prefill(self, row: Row, params: SamplingParams, slot: int, seed: int) -> int:
        taps = () if self.drafter is None else self.drafter.taps
        logits, tapped = self.target.prefill(row.prompt, slot, taps, chunk=PREFILL_CHUNK)
        device = self.target.device
        place = torch.tensor([slot], device=device)
        if self.drafter is not None:
            start = torch.zeros(1, dtype=torch.long, device=device)
            self.drafter.observe(tapped, Rows(place, start, len(row.prompt)))
        length = len(row.prompt)
        self.slots.open(slot, length=length, anchor=0, params=params, seed=seed)
        draws = self.slots.draws(place, sampled=params.samples, filtered=needs_filter(params))
        chosen = draws.choose(logits.view(1, 1, -1), torch.tensor([length], device=device))
        self.slots.anchors[slot] = chosen[0, 0]
        return int(chosen)

    def step(self) -> list[Commit]:
        """Start a cycle and read a report: the same one's, or the last one's when ahead."""
        if self._seats:
            self._start()
        if self.ahead and len(self._flights) < 2 and self._seats:
            return []
        return self._land() if self._flights else []

    def capture(self, rows: int, params: SamplingParams) -> None:
        """Record every kind of cycle that up to so many such rows could need, where graphs are on.

        Otherwise each is recorded at its first use, inside somebody's answer.
        """
        chosen = (self.depth,) if self.policy is None else depths(self.depth)
        for depth in chosen:
            plan = Plan(depth, sampled=params.samples, filtered=needs_filter(params))
            with self._on_device():
                self.runner.capture_up_to(rows, plan)

    def _start(self) -> None:
        seats = tuple(self._seats)
        sampled = any(seat.params.samples for seat in seats)
        filtered = any(needs_filter(seat.params) for seat in seats)
        depth = self.depth if self.policy is None else self.policy.choose(len(seats))
        plan = Plan(depth, sampled=sampled, filtered=filtered)
        with self._on_device():
            report = self.runner.start([seat.slot for seat in seats], plan)
        self._flights.append(Flight(seats, plan.depth, report))

    def _land(self) -> list[Commit]:
        flight = self._flights.popleft()
        commits, failure = [], None
        for seat, (accepted, *tokens) in zip(flight.seats, flight.report().tolist(), strict=True):
            if seat.row.finish_reason is not None:
                self.release(seat.row)  # somebody else ended it
            if seat.left:
                continue
            if self.policy is not None and flight.depth:
                self.policy.acceptance.observe(accepted, flight.depth)
            try:
                commits.append(self._commit(seat, tokens, accepted, flight.depth))
            except Exception as error:
                self.release(seat.row)
                failure = failure or error
        if failure is not None:
            raise failure
        return commits

    def _commit(self, seat: Seat, tokens: Sequence[int], accepted: int, depth: int) -> Commit:
        seat.cycles += 1
        commit = self._take(seat, tokens[: accepted + 1], accepted=accepted)
        kept = {"accepted": commit.accepted, "committed": len(commit.tokens)}
        seat.row.stats.record(drafts=offered(seat.row, commit, depth), **kept)
        return commit

    def _take(self, seat: Seat, tokens: Sequence[int], *, accepted: int) -> Commit:
        row = seat.row
        taken = row.take(tokens)
        if row.finish_reason is not None:
            self.release(row)
        accepted = min(accepted, len(taken))
        return Commit(row.index, taken, accepted, seat.cycles, row.finish_reason)

    def release(self, row: Row) -> None:
        """Give a row's slot back, whether it has ended or not."""
        for place, seat in enumerate(self._seats):
            if seat.row is row:
                del self._seats[place]
                self._free.append(seat.slot)
                seat.left = True
                return

    def run(self, rows: Sequence[tuple[Row, SamplingParams, int | None]]) -> Iterator[Commit]:
        """Decode all rows (each with parameters and a seed), as many at a time as there are slots.

        Who stops listening takes the rows out.
        """
        waiting = deque(rows)
        try:
            while waiting or self.busy:
                while waiting and self._free:
                    row, params, seed = waiting.popleft()
                    yield self.admit(row, params, seed=seed)
                yield from self.step()
        finally:
            for row, _, _ in rows:
                self.release(row)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Launches and captures go to the current GPU: it must be the target's."""
        device = self.target.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
