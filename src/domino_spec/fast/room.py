"""What an engine is made of: weights, slots, what runs over them; and how much of each there is."""

from __future__ import annotations

import copy
from collections import deque
from typing import Self

import torch

from domino_spec.errors import InputError
from domino_spec.fast.checks import check_settings
from domino_spec.fast.cycle import Cycle
from domino_spec.fast.graphs import Runner
from domino_spec.fast.policy import DepthPolicy
from domino_spec.fast.reading import PromptReader
from domino_spec.fast.seating import Seating
from domino_spec.fast.seats import Flight
from domino_spec.fast.slots import Slots
from domino_spec.fast.sources import AnySource, as_maker
from domino_spec.fast.target import LeanTarget
from domino_spec.targets import Target


class EngineRoom:
    """A target, a drafter and slots for rows, which an idle engine can have more or fewer of."""

    def __init__(
        self,
        target: Target,
        drafter: AnySource | None,
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
        maker = None if drafter is None else as_maker(drafter, candidates)
        if maker is not None:
            self.depth = maker.default_depth if depth is None else depth
        # A row may run a block past its end, and another one started ahead of its report.
        self.margin = 2 * (self.depth + 1) + (maker.reach if maker is not None else 0)
        sizes = {"slots": slots + 1, "capacity": capacity + self.margin}
        self.packs = not on_gpu if pack is None else pack
        self.capacity = capacity
        self.target = LeanTarget(target, **sizes, pack=self.packs)
        self.drafter = (
            maker.lean(self.target, **sizes, pack=self.packs) if maker is not None else None
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
        for seat in self._seating.seats:
            seat.left = True  # who still admits a row must not write into memory given back
        self._seat_rows(0)
        self.resize(slots=slots, capacity=self.capacity)

    def twin(self, *, slots: int, capacity: int, reuse: bool | None = None) -> Self:
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
