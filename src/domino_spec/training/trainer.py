"""The training loop: read, draft, learn; report, evaluate, save; stop cleanly."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from domino_spec.data import PackedBatches
from domino_spec.errors import TrainingError
from domino_spec.training.blocks import Blocks, Feed, Plan, Work
from domino_spec.training.forecast import Forecast
from domino_spec.training.learning import Learning
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import Objective, StepTerms
from domino_spec.training.optimiser import Masters, Optimiser
from domino_spec.training.schedule import Budget, Schedule
from domino_spec.training.world import World


class Meter:
    """Sums since the last report."""

    def __init__(self, depth: int, world: World) -> None:
        self._depth, self._world = depth, world
        self._reset()

    def add(self, terms: StepTerms, blocks: Blocks) -> None:
        """One forward's terms."""
        self._hits += torch.stack((terms.base_hits, terms.final_hits, terms.counts))
        self._runs += terms.run_length
        self._forwards += 1
        self._conversations += blocks.conversations
        self._tokens += blocks.supervised_tokens
        self._labels += blocks.label_count

    def step(self, loss: Tensor, norm: Tensor) -> None:
        """One step's loss (this process's share of it) and gradient norm."""
        self._loss += loss
        self._norm += norm
        self._steps += 1

    @property
    def empty(self) -> bool:
        """Whether no step was made since the last report."""
        return self._steps == 0

    def pause(self, seconds: float) -> None:
        """Time that was not training."""
        self._paused += seconds

    def report(self) -> dict[str, Any]:
        """Means since the last report; waits for the device."""
        world = self._world
        sums = torch.cat((self._hits.flatten(), torch.stack((self._loss, self._runs)))).double()
        values = world.sum_tensors(sums).tolist()
        hits, (loss, runs) = values[:-2], values[-2:]
        depth = self._depth
        base, final, counts = hits[:depth], hits[depth : 2 * depth], hits[2 * depth :]
        seconds = time.perf_counter() - self._since - self._paused
        conversations = world.sum(self._conversations)
        told = {
            "loss": loss / max(1, self._steps) / world.size,
            "grad_norm": float(self._norm) / max(1, self._steps),
            "run_length": runs / max(1, self._forwards * world.size),
            "base_accuracy": [_ratio(b, c) for b, c in zip(base, counts, strict=True)],
            "accuracy": [_ratio(f, c) for f, c in zip(final, counts, strict=True)],
            "conversations_per_second": conversations / seconds,
            "answer_tokens_per_second": world.sum(self._tokens) / seconds,
            "labels_per_second": world.sum(self._labels) / seconds,
            "seconds_per_step": seconds / max(1, self._steps),
        }
        self._reset()
        return told

    def _reset(self) -> None:
        device = self._world.device
        self._hits = torch.zeros(3, self._depth, device=device)
        self._loss = torch.zeros((), device=device)
        self._norm = torch.zeros((), device=device)
        self._runs = torch.zeros((), device=device)
        self._steps = self._forwards = self._conversations = self._tokens = self._labels = 0
        self._paused = 0.0
        self._since = time.perf_counter()


def _ratio(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0


class Watch:
    """Notices a loss or a gradient that is no number, and a loss that runs away."""

    def __init__(self, factor: float, *, patience: int = 3) -> None:
        self._factor, self._patience = factor, patience
        self._smooth: float | None = None
        self._best = float("inf")
        self._bad = 0

    def see(self, loss: float, norm: float = 0.0) -> str | None:
        """What is wrong, in words, or None."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):  # the weights are spoilt already, the next loss will show it
            return f"the gradient's norm is {norm}"
        self._smooth = loss if self._smooth is None else 0.7 * self._smooth + 0.3 * loss
        self._best = min(self._best, self._smooth)
        self._bad = self._bad + 1 if self._smooth > self._factor * self._best else 0
        if self._bad >= self._patience:
            return f"the loss rose to {self._smooth:.3g} from its best of {self._best:.3g}"
        return None


class Observer(Protocol):
    """Follows a run."""

    def report(self, step: int, values: dict[str, Any]) -> None:
        """A few steps were made, or an evaluation."""

    def close(self) -> None:
        """The run is over."""


@dataclass(frozen=True)
class Intervals:
    """Every how many steps something happens: 0 means never, None at each tenth of the run."""

    log: int
    evaluate: int | None
    save: int | None

    def due(self, every: int | None, step: int, last: int, *, tenth: bool) -> bool:
        """Whether it happens after this step, which may complete a tenth of the run."""
        if every == 0:
            return False
        return step == last or (tenth if every is None else step % every == 0)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    signal: int | None
    last: dict[str, Any]


class _EvaluationAbandoned(BaseException):
    """A signal came during an evaluation; no handler of errors inside it may take this for one."""


class Trainer:
    """One run over a frozen target. What it needs is put together by `prepare`."""

    def __init__(
        self,
        *,
        objective: Objective[Any],
        masters: Masters,
        learn: Learning,
        optimiser: Optimiser,
        batches: PackedBatches,
        plan: Plan,
        schedule: Schedule,
        budget: Budget,
        forecast: Forecast,
        world: World,
        accumulate: int,
        clip: float,
        seed: int,
        intervals: Intervals,
        watch: Watch,
        observers: Sequence[Observer] = (),
        evaluate: Callable[[], dict[str, Any]] | None = None,
        save: Callable[[Trainer], Path | None] | None = None,
    ) -> None:
        self.objective, self.masters, self.optimiser = objective, masters, optimiser
        self.schedule, self.budget, self.world = schedule, budget, world
        self.forecast = forecast
        self.step = 0
        self.position = batches.state_dict()
        self.saved_at: Path | None = None
        """The last checkpoint."""
        self.tokens_per_cycle: float | None = None
        """As last measured on what is held out."""
        self._batches, self._plan, self.learn = batches, plan, learn
        self._accumulate, self._clip, self._seed = accumulate, clip, seed
        self._intervals, self._watch = intervals, watch
        self._observers = list(observers)
        self._evaluate, self._save = evaluate, save
        self._meter = Meter(objective.depth, world)
        self._signal: int | None = None
        self._evaluating = False
        self._saved_step: int | None = None
        self._last: dict[str, Any] = {}
        self._started = time.perf_counter()

    def run(self) -> Outcome:
        """Train to the end, or until told to stop; both leave a checkpoint."""
        feed = Feed(
            self._batches,
            self._plan,
            first_step=self.step,
            last_step=self.budget.last_step(self.step),
            parts=self._accumulate,
            seed=self._seed,
            pin=self.world.device.type == "cuda",
        )
        with self._listening():
            try:
                self.budget.begin()
                for work in feed:
                    self._one_step(work)
                    if self._should_stop() or self.budget.over(self.step):
                        break
                unmeasured = self.tokens_per_cycle is None and self._signal is None
                if self._evaluate and unmeasured and self.budget.over(self.step):
                    self._measure(self._evaluate)  # resumed where only this was left to do
            finally:
                feed.close()
                for observer in self._observers:
                    observer.close()
        return Outcome(
            step=self.step,
            finished=self.budget.over(self.step),
            signal=self._signal,
            last=self._last,
        )

    def _one_step(self, work: Work) -> None:
        step, place = self.step, self.budget.place(self.step)
        device = self.world.device
        mixture = Mixture.of(
            base=self.schedule.base_share(place),
            variation=self.schedule.tv_share(place),
            device=device,
        )
        weight = self.world.sum(sum(part.total_weight for part in work.parts))
        # Gradients are averaged over processes: each divides by its share of the total.
        divisor = max(weight, 1e-9) / self.world.size
        loss = torch.zeros((), device=device)
        for part in work.parts:
            terms = self.learn(part, mixture, divisor)
            loss += terms.loss
            self._meter.add(terms, part)
        with record_function("step: optimiser"):
            norm = self.masters.clip(self._clip)
            self.optimiser.step(self.schedule.rate(place))
            self.masters.packing = self.schedule.packs(place)
            self.masters.give_weights()
            self.masters.clear()
        self._meter.step(loss, norm)
        self.step, self.position = step + 1, work.position
        settling = self.budget.pace is None
        if settling and device.type == "cuda":
            torch.cuda.synchronize(device)  # the first pace would be that of launches alone
        self.budget.count()

        intervals, places = self._intervals, self.budget.places
        tenth = 10 * self.budget.place(self.step) // places > 10 * place // places
        last = self.budget.last_step(self.step)
        due = partial(intervals.due, step=self.step, last=last, tenth=tenth)
        saves = self._save is not None and due(intervals.save)
        if due(intervals.log) or saves:
            self._report(place)
        elif settling and self.budget.pace is not None:
            self._tell_plan(self.budget.pace)
        if self._evaluate and due(intervals.evaluate):
            with self._paused():
                self._measure(self._evaluate)
        if saves:
            self.save()

    def _measure(self, evaluate: Callable[[], dict[str, Any]]) -> None:
        """Evaluate, unless a signal comes: SIGKILL may follow before an evaluation would end."""
        try:
            self._evaluating = True  # before the look at the signal, so that none is missed
            if self._signal is not None:
                return
            self.learn.release()
            measured = evaluate()
            self._evaluating = False
        except _EvaluationAbandoned:
            return
        finally:
            self._evaluating = False
        self.tokens_per_cycle = measured.get("tokens_per_cycle")
        if self.tokens_per_cycle is not None:
            share = self.budget.share(self.step)
            measured |= self.forecast.at_end(self.tokens_per_cycle, share)
        self._tell(self.step, measured)

    def _tell_plan(self, seconds_per_step: float) -> None:
        """As soon as the pace is known, from which follow the steps of a run over seconds."""
        values: dict[str, Any] = {"seconds_per_step": seconds_per_step, **self._time_left()}
        steps = self.budget.expected_steps(self.step)
        if steps is not None and self.budget.timed:
            values["plan"] = self.forecast.plan(steps)
        self._tell(self.step, values)

    def _time_left(self) -> dict[str, float]:
        left = self.budget.seconds_left(self.step)
        return {} if left is None else {"seconds_left": left}

    def _report(self, place: int) -> None:
        values = self._meter.report()
        values |= {
            "lambda": round(self.schedule.base_share(place), 6),
            "learning_rate": self.schedule.rate(place),
            "epoch": self.position["epoch"],
            "seconds": time.perf_counter() - self._started,
            "training_seconds": self.budget.seconds,
            **self._time_left(),
        }
        if self.world.device.type == "cuda":
            values["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.world.device)
        self._tell(self.step, values)
        trouble = self._watch.see(values["loss"], values["grad_norm"])
        if trouble:
            kept = (
                f"the last good checkpoint is {self.saved_at}"
                if self.saved_at
                else "no checkpoint had been written yet"
            )
            raise TrainingError(
                f"training stopped at step {self.step}: {trouble}; {kept}. Try a smaller "
                "learning_rate, a longer warm-up or a smaller clip, and look at the data."
            )

    def save(self) -> None:
        """Write a checkpoint now."""
        if self._save is not None:
            with self._paused():
                self.saved_at = self._save(self) or self.saved_at
            self._saved_step = self.step

    def _should_stop(self) -> bool:
        if not self.world.any(self._signal is not None):
            return False
        self._signal = self._signal or signal.SIGTERM
        if self._saved_step != self.step:
            if not self._meter.empty:  # a loss that is no number must not be saved
                self._report(self.budget.place(self.step - 1))
            self.save()
        return True

    def _tell(self, step: int, values: dict[str, Any]) -> None:
        self._last = {**self._last, **values}
        for observer in self._observers:
            observer.report(step, values)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        paused = time.perf_counter() - began
        self._meter.pause(paused)
        self.budget.pause(paused)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the step that is under way, without evaluating."""

        def hear(number: int, _frame: Any) -> None:
            if self._signal is not None:  # asked twice: at once
                raise KeyboardInterrupt
            self._signal = number
            if self._evaluating:
                raise _EvaluationAbandoned

        kinds = (signal.SIGTERM, signal.SIGINT)
        try:
            before = {kind: signal.signal(kind, hear) for kind in kinds}
        except ValueError:  # not the main thread: signals never arrive here
            yield
            return
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
