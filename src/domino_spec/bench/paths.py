"""The ways to run a method: the reference loop, which takes all, and the engine.

Plain decoding runs on the same path as what it is compared with: in the same loop without drafts
(one forward a token, no layer captured), or on an engine without a drafter over the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from domino_spec.decoding import Drafter, RunStats, SamplingParams, decode
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stats import now
from domino_spec.engine.calibration import adapt_depth
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.sizes import graph_bytes
from domino_spec.evaluation.runs import make_sequence
from domino_spec.targets import Target

Stages = Mapping[str, float]
"""Seconds of a cycle's draft and verify."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its number in its set, from which its draws follow."""

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One batch, answered once by one method."""

    seconds: float
    """From the prompts to the last token, everything in between."""
    prefill: float
    draft: float | None
    """None where a cycle is one piece; `EnginePath.stages` measures its parts apart."""
    verify: float | None
    cycles: int
    """Cycles of the whole batch; sequences count their own."""
    sequences: tuple[Decoded, ...]
    peak_memory: int | None


class ReferencePath:
    """The reference loop through Transformers: any target, any drafter."""

    def __init__(self, target: Target, *, eos: Collection[int]) -> None:
        self.target = target
        self._eos = eos
        self._memory = PeakMemory(target.device)

    def run(self, method: Drafter, prompts: Sequence[Prompt], params: SamplingParams) -> Timed:
        """Prefill, draft and verify are separated by waiting for the device at each boundary."""
        sequences = self._sequences(prompts, params)
        stats, cycles = RunStats(), 0
        self._memory.reset()
        start = now(self.target.device)
        for commit in decode(self.target, method, sequences, stats):
            cycles = commit.cycle
        seconds = now(self.target.device) - start
        return Timed(
            seconds=seconds,
            prefill=stats.prefill_seconds,
            draft=stats.draft_seconds,
            verify=stats.verify_seconds,
            cycles=cycles,
            sequences=tuple(sequences),
            peak_memory=self._memory.read(),
        )

    def prepare(self, method: Drafter, batch: int, params: SamplingParams) -> None:
        """Whatever would otherwise happen at first use, inside a timed run: nothing here."""

    def stages(self, method: Drafter, batch: int, context: int) -> Stages | None:  # noqa: ARG002
        """The parts of a cycle timed alone, where `run` cannot tell them apart: it can here."""
        return None

    def _sequences(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Decoded]:
        """A sequence draws from the seed and its own number, whatever its batch."""
        return [make_sequence(each.number, each.tokens, params, eos=self._eos) for each in prompts]


class EnginePath(ReferencePath):
    """An engine a method, all over the same weights."""

    def __init__(
        self,
        target: Target,
        methods: Sequence[Drafter],
        *,
        eos: Collection[int],
        slots: int,
        capacity: int,
        adaptive: bool = False,
    ) -> None:
        super().__init__(target, eos=eos)
        self.engines = {
            method.name: Engine(target, method, slots=slots, capacity=capacity, tree=method.nodes)
            for method in methods
        }
        self._adaptive = adaptive
        self._inside = target.device.type == "cpu"
        """Whether the parts of a cycle can be timed inside it."""

    def run(self, method: Drafter, prompts: Sequence[Prompt], params: SamplingParams) -> Timed:
        """All prompts are computed together, then decoded to the end of the last one."""
        engine = self.engines[method.name]
        sequences = self._sequences(prompts, params)
        cycles = 0
        # On a GPU a cycle is one graph without a wait inside it: `stages` times its parts.
        clock = {"draft": 0.0, "verify": 0.0} if self._inside else None
        engine.runner.clock = clock
        self._memory.reset()
        start = now(self.target.device)
        for sequence in sequences:
            engine.add_request(sequence)
        admitted = None
        while engine.busy:
            cycles += any(output.cycle for output in engine.step())
            if admitted is None and all(sequence.output for sequence in sequences):
                admitted = now(self.target.device) if self._inside else time.perf_counter()
        end = now(self.target.device)
        return Timed(
            seconds=end - start,
            prefill=(admitted or end) - start,
            draft=None if clock is None else clock["draft"],
            verify=None if clock is None else clock["verify"],
            cycles=cycles,
            sequences=tuple(sequences),
            peak_memory=self._memory.read(),
        )

    def prepare(self, method: Drafter, batch: int, params: SamplingParams) -> None:
        """Costs are measured and cycles captured beforehand."""
        engine = self.engines[method.name]
        if self._adaptive and engine.drafter is not None and engine.policy is None:
            adapt_depth(engine)
        engine.capture(batch, params)

    def stages(self, method: Drafter, batch: int, context: int) -> Stages | None:
        """Greedy, at the drafter's whole depth; None for trees, or if drafts change each cycle."""
        engine = self.engines[method.name]
        if self._inside or engine.policy is not None or engine.nodes:
            return None
        bench = Bench(engine, context=min(context, engine.capacity))
        if engine.drafter is None or not engine.depth:
            return {"draft": 0.0, "verify": bench.cycle_seconds(batch, Plan(0))}
        parts = {stage.name: stage.seconds for stage in bench.stages(batch, engine.depth)}
        verify = sum(parts.pop(name) for name in ("verify", "logits and choice"))
        return {"draft": sum(parts.values()), "verify": verify}


_PROCESSES = Path("/proc")
_RESET_PEAK = "5"


class PeakMemory:
    """On a GPU what torch allocated there and graphs keep, on Linux the process' resident memory.

    Everything loaded counts, other methods' weights too: it is what the run took, here and now.
    """

    def __init__(self, device: torch.device, *, process: int | None = None) -> None:
        """Of this process, or of another one on a CPU by its id."""
        self._device = device
        self._place = _PROCESSES / ("self" if process is None else str(process))

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            (self._place / "clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return  # the peak is then that of the whole process so far

    def read(self) -> int | None:
        """Bytes since the last reset; None where unknown."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) + graph_bytes(self._device)
        try:
            status = (self._place / "status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(found[0]) * 1024 if found else None
