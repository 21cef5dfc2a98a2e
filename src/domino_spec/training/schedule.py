"""What changes over a run: the learning rate, the curriculum's λ, the late loss's share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from domino_spec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Functions of the step, which need to know how many steps there will be."""

    total_steps: int
    learning_rate: float
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0
    curriculum: bool = True
    """λ falls linearly from 1 to 0; without it only the corrected logits are trained."""
    curriculum_ratio: float = 1.0
    """The part of the run over which λ falls."""
    tv_weight: float = 0.0
    """The share that total variation reaches in the corrected logits' loss."""
    tv_start: float = 0.5
    """The part of the run before total variation comes in."""

    def __post_init__(self) -> None:
        if not isinstance(self.total_steps, int) or self.total_steps < 1:
            raise ConfigError(
                f"the number of steps is {self.total_steps!r}; the learning rate and λ need to "
                "know it. Give `steps` or `epochs`."
            )
        if not 0 < self.curriculum_ratio <= 1:
            raise ConfigError(
                f"curriculum_ratio is {self.curriculum_ratio}; expected more than 0, at most 1."
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
        if not self.curriculum:
            return 0.0
        return max(0.0, 1.0 - step / (self.curriculum_ratio * self.total_steps))

    def tv_share(self, step: int) -> float:
        """How much of the corrected logits' loss is total variation."""
        done = step / self.total_steps
        if done <= self.tv_start:
            return 0.0
        return self.tv_weight * (done - self.tv_start) / (1 - self.tv_start)
