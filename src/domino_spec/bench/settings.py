"""What a head-to-head measures: the settings that every figure of it shares, and its cells."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from domino_spec.decoding import SamplingParams
from domino_spec.decoding.params import AcceptRule
from domino_spec.errors import InputError
from domino_spec.evaluation import Protocol

LoopName = Literal["fast", "lean", "reference"]
"""What runs all methods of a run, plain decoding among them: the engine, or the reference loop.

`lean`, the reference loop over the engine's forward, is in records of earlier versions alone."""

LoopChoice = Literal["auto", "fast", "reference"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How everything of one run is measured."""

    engine: LoopName
    max_new_tokens: int = 256
    longest_prompt: int = 399
    shortest_answer: int = 32
    """Shorter answers are left out and counted."""
    repeats: int = 3
    """How often each method answers each prompt; the median counts."""
    warm_up: int = 1
    """Batches that each method decodes before a cell is timed."""
    seed: int = 0
    """Prompt i draws from seed + i; the order of methods is drawn from it too."""
    accept: AcceptRule = "coupled"
    """How drafts are accepted when sampling."""
    adaptive: bool = False
    """Whether the engine chooses each cycle's depth from what cycles cost here."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 2), ("longest_prompt", 1), ("shortest_answer", 2), ("repeats", 1),
            ("warm_up", 0), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} is {value!r}; expected {least} or more.")
        if self.engine not in get_args(LoopName):
            raise InputError(f"engine is {self.engine!r}; expected fast or reference.")
        if self.engine == "fast" and self.accept != "coupled":
            raise InputError(
                f"accept is {self.accept!r}, which the engine does not know: it draws drafts and "
                "target with the same noise (coupled). Leave accept out, or take the reference "
                "loop."
            )
        if self.engine != "fast" and self.adaptive:
            raise InputError(
                "only the engine adapts its depth; take the engine, or leave adaptive out."
            )

    def protocol(self) -> Protocol:
        """Which prompts and answers count."""
        return Protocol(
            longest_prompt=self.longest_prompt,
            max_new_tokens=self.max_new_tokens,
            shortest_answer=self.shortest_answer,
            seed=self.seed,
        )

    def params(self, temperature: float) -> SamplingParams:
        """How every method of a cell generates."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            seed=self.seed,
            accept=self.accept,
        )

    def same_text(self, temperature: float) -> bool:
        """Whether a seed gives the same text with drafts and without, so that texts compare."""
        return temperature == 0 or self.accept != "rejection"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


@dataclass(frozen=True, order=True)
class Cell:
    """What is one line of a table: a task at a temperature, so many prompts at a time."""

    task: str
    temperature: float
    batch_size: int

    def __str__(self) -> str:
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size} rows"
        return f"{self.task}, T {self.temperature:g}, {rows}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def plan_cells(
    tasks: Sequence[str], temperatures: Sequence[float], batch_sizes: Sequence[int]
) -> list[Cell]:
    """Every task at every temperature with every batch size, each once."""
    for name, values in (("temperature", temperatures), ("batch size", batch_sizes)):
        if not values:
            raise InputError(f"there is no {name}; give at least one.")
        if len(set(values)) < len(values):
            raise InputError(f"a {name} is given twice: {', '.join(f'{v:g}' for v in values)}.")
    for temperature in temperatures:
        if not math.isfinite(temperature) or temperature < 0:
            raise InputError(f"a temperature is {temperature}; expected 0 or more.")
    for size in batch_sizes:
        if size < 1:
            raise InputError(f"a batch size is {size}; expected 1 or more.")
    return [Cell(*each) for each in itertools.product(tasks, temperatures, batch_sizes)]


def digest(value: object) -> str:
    """A hash of plain values."""
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
