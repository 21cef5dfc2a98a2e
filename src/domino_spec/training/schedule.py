"""How long a run goes on, and what changes over it: learning rate, λ, the late loss's share."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from domino_spec.errors import ConfigError
from domino_spec.training.world import World


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Functions of the step, which need to know how many steps there will be."""

    total_steps: int
    learning_rate: float
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0
    base_weight: float = 0.3
    """What λ, the share of the base logits' own loss, ends at."""
    curriculum_ratio: float = 0.0
    """The part of the run over which λ falls to that from 1; 0 keeps it where it ends."""
    tv_weight: float = 0.0
    """The share that total variation reaches in the corrected logits' loss."""
    tv_start: float = 0.5
    """The part of the run before total variation comes in."""
    pack_start: float = 0.7
    """The part of the run before weights are rounded as packing rounds them."""

    def __post_init__(self) -> None:
        if not isinstance(self.total_steps, int) or self.total_steps < 1:
            raise ConfigError(
                f"the number of steps is {self.total_steps!r}; the learning rate and λ need to "
                "know it. Give `steps` or `epochs`."
            )
        if not 0 <= self.curriculum_ratio <= 1:
            raise ConfigError(
                f"curriculum_ratio is {self.curriculum_ratio}; expected 0 (no curriculum) to 1."
            )

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine."""
        warmup = max(1, round(self.warmup_ratio * self.total_steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.total_steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)

    def base_share(self, step: int) -> float:
        """λ: how much of the loss is the base logits' own."""
        over = self.curriculum_ratio * self.total_steps
        left = max(0.0, 1.0 - step / over) if over else 0.0
        return self.base_weight + (1.0 - self.base_weight) * left

    def tv_share(self, step: int) -> float:
        """How much of the corrected logits' loss is total variation."""
        done = step / self.total_steps
        if done <= self.tv_start:
            return 0.0
        return self.tv_weight * (done - self.tv_start) / (1 - self.tv_start)

    def packs(self, step: int) -> bool:
        """Whether the drafter learns with the weights it will be packed with."""
        return step >= self.pack_start * self.total_steps


PLACES = 10_000
"""How finely a schedule over seconds is divided."""
_SETTLING = 3
"""First steps, which wait for the compiler, are counted at the pace of those that follow."""


class Budget:
    """Counts steps and the seconds they took; evaluating and saving cost nothing.

    A schedule over steps is at the step itself. A schedule over seconds is at the share of the
    seconds that has passed: learning rate and λ end where they should, however many steps that
    takes. With both, what comes first ends the run. All processes go by their mean, so that they
    agree.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert steps is not None or seconds is not None
        self._steps, self._limit = steps, seconds
        self._world = world or World()
        self._clock = clock
        self._before = 0.0  # of runs that this one goes on with
        self._made = 0
        self._timed = 0.0
        self._paused = self._pause_per_step = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Spent on the steps made so far."""
        timed = self._made - _SETTLING
        return self._before + (self._timed * self._made / timed if timed > 0 else 0.0)

    @property
    def pace(self) -> float | None:
        """Seconds a step takes; None until enough were timed."""
        timed = self._made - _SETTLING
        return self._timed / timed if timed >= _SETTLING else None

    @property
    def timed(self) -> bool:
        """Whether seconds may end the run, so that its steps follow from the pace."""
        return self._limit is not None

    @property
    def places(self) -> int:
        """How many places the schedule has."""
        if self._limit is None:
            assert self._steps is not None
            return self._steps
        return PLACES

    def place(self, step: int) -> int:
        """Where the schedule is before this step."""
        return step if self._limit is None else int(PLACES * self.share(step))

    def over(self, step: int) -> bool:
        """Whether the run is over after this many steps."""
        return self.share(step) >= 1

    def last_step(self, step: int) -> int:
        """The most steps there can be, seen from this one."""
        if self._limit is not None and self.over(step):
            return step
        return sys.maxsize if self._steps is None else self._steps

    def share(self, step: int) -> float:
        """The part of the run that is done after this many steps."""
        by_steps = 0.0 if self._steps is None else step / self._steps
        by_seconds = 0.0 if self._limit is None else self.seconds / self._limit
        return min(1.0, max(by_steps, by_seconds))

    def expected_steps(self, step: int) -> int | None:
        """How many steps the whole run will take, seen from this one; None until that is known."""
        if self._limit is None:
            return self._steps
        if self.pace is None:
            return None
        fitting = step + math.ceil(max(0.0, self._limit - self.seconds) / self.pace)
        return fitting if self._steps is None else min(fitting, self._steps)

    def seconds_left(self, step: int) -> float | None:
        """To the end of the run, evaluations and checkpoints at the rate so far included."""
        steps = self.expected_steps(step)
        if steps is None or self.pace is None:
            return None
        return (steps - step) * (self.pace + self._pause_per_step)

    def resume(self, seconds: float) -> None:
        """Go on where so much had been spent."""
        self._before = seconds

    def begin(self) -> None:
        """The first step starts now."""
        self._since = self._clock()

    def count(self) -> None:
        """A step was made."""
        now = self._clock()
        assert self._since is not None, "begin comes first"
        took, self._since = now - self._since, now
        if self._limit is not None and not self._world.alone:
            took = self._world.sum(took) / self._world.size
        self._made += 1
        if self._made > _SETTLING:
            self._timed += took

    def pause(self, seconds: float) -> None:
        """So much passed that was not training."""
        if self._since is not None:
            self._since += seconds
        self._paused += seconds
        self._pause_per_step = self._paused / max(1, self._made)
