"""Runs cycles: directly, or captured in CUDA graphs, one for each kind and size of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from domino_spec.engine.cycle import Cycle, Plan
from domino_spec.engine.kernels.runtime import on_device

LADDER = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches are filled up to one of these sizes."""
MOST_GRAPHS = 256
"""Kinds of cycles kept; each takes a few megabytes, and requests of all kinds make more."""

_T = TypeVar("_T")


class Recorder:
    """Captures work on device tensors alone in CUDA graphs, all in one pool of memory.

    What one graph leaves in its results, another may write over.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
        """A graph on the current GPU, and the results that each replay fills anew."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and allocate before anything is recorded
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile (a server makes rows): only ours is watched.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        self._pool = self._pool or graph.pool()
        return graph, results


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor  # [rows]
    report: Tensor  # [rows, depth + 2], and scores where the plan says so


class Runner:
    """Starts cycles without waiting for them, on the GPU where their slots are."""

    def __init__(self, cycle: Cycle, *, graphs: bool) -> None:
        self._cycle = cycle
        self._device = cycle.slots.device
        self._graphs = graphs
        self._captured: dict[tuple[int, Plan], Captured] = {}
        self.recorder = Recorder()

    def start(self, slots: Sequence[int], plan: Plan) -> Callable[[], Tensor]:
        """Start a cycle for these slots; what is returned waits for its report."""
        with on_device(self._device):
            if not self._graphs:
                return self._cycle.run(torch.tensor(slots, device=self._device), plan).cpu
            size = self.size_of(len(slots))
            captured = self._captured.pop((size, plan), None) or self.capture(size, plan)
            self._captured[size, plan] = captured  # the last one used is the last to go
            filled = [*slots, *[self._cycle.slots.spare] * (size - len(slots))]
            captured.slots.copy_(torch.tensor(filled).pin_memory(), non_blocking=True)
            captured.graph.replay()
            return _read_back(captured.report, len(slots))

    def read_back(self, report: Tensor) -> Callable[[], Tensor]:
        """What waits for a report that was not captured."""
        return _read_back(report, len(report)) if self._device.type == "cuda" else report.cpu

    def size_of(self, rows: int) -> int:
        """The size of the batch that so many rows run in here."""
        return filled_size(rows) if self._graphs else rows

    def capture_up_to(self, rows: int, plan: Plan) -> None:
        """Record a cycle for each size that so many rows, or fewer, are filled up to."""
        if self._graphs:
            with on_device(self._device):
                for size in reversed(sizes_up_to(rows)):  # smaller ones fit into what it took
                    if (size, plan) not in self._captured:
                        self.capture(size, plan)

    def capture(self, size: int, plan: Plan) -> Captured:
        """Record one cycle of this kind; rows in use are not touched."""
        while len(self._captured) >= MOST_GRAPHS:
            self._forget_oldest()
        spare = self._cycle.slots.spare
        slots = torch.full((size,), spare, dtype=torch.long, device=self._device)
        graph, report = self.recorder.record(lambda: self._cycle.run(slots, plan))
        captured = Captured(graph, slots, report)
        self._captured[size, plan] = captured
        return captured

    def _forget_oldest(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # it may still run
        del self._captured[next(iter(self._captured))]


def filled_size(rows: int) -> int:
    """The size of the batch that a graph for so many rows has."""
    return next((step for step in LADDER if step >= rows), rows)


def sizes_up_to(rows: int) -> list[int]:
    """The sizes of batches that so many rows, or fewer, run in."""
    return sorted({filled_size(count) for count in range(1, rows + 1)})


def _read_back(report: Tensor, rows: int) -> Callable[[], Tensor]:
    """Copy to the host beside the next cycle; wait only when the copy is wanted."""
    host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    host.copy_(report, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return host[:rows]

    return wait
