"""Settings of `domino bench` and `domino bench engine`: their options are fields of the models."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from domino_spec.errors import InputError
from domino_spec.settings import (
    AcceptRule,
    Candidates,
    Depth,
    DraftSinks,
    DraftWindow,
    Settings,
    ShiftLabel,
    setting,
)

if TYPE_CHECKING:
    from domino_spec.decoding import SamplingParams
    from domino_spec.evaluation import Protocol

LLAMA_CPP = "llama.cpp"
"""The kind of a method that is another implementation, and its name."""
PROMPTS_HELP = (
    '`maths`, code, chat (built in), JSON lines of {"turns": [...]} or hf:NAME[:SPLIT]; '
    "repeatable; unset: the three built in"
)
LIMIT_HELP = "prompts per set, from the first"
_LONGEST_PROMPT = 399
_RECORDED = ("engine", "max_new_tokens", "shortest_answer", "repeats", "warm_up", "seed", "accept",
             "adaptive")  # fmt: skip

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
AtLeastTwo = Annotated[int, Ge(2)]

_drafters = partial(setting, group="Drafters")
_what = partial(setting, group="What is measured")
_how = partial(setting, group="How it is measured")
_engine = partial(setting, group="Measurement")


@dataclass(frozen=True, order=True)
class Cell:
    """What is one line of a table: a task at a temperature, so many prompts at a time."""

    task: str
    temperature: float
    batch_size: int

    def __str__(self) -> str:
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size} rows"
        return f"{self.task}, T {self.temperature:g}, {rows}"


class BenchSettings(Settings):
    """What is compared, and how everything of the run is measured."""

    target: str = setting(..., "the target model: a folder, a GGUF file or a hub id", argument="")
    draft: tuple[str, ...] = _drafters(
        (),
        "a drafter of any kind: a folder, a safetensors file, a hub id, released:NAME or "
        "lookup[:DEPTH]; repeatable",
    )
    shift_label: ShiftLabel
    depth: Depth
    tree: Annotated[int, Ge(0), Le(63)] = _drafters(
        0, "measure each drafter that can also with trees of so many drafts; 0: chains alone"
    )
    candidates: Candidates
    draft_window: DraftWindow
    draft_sinks: DraftSinks
    adaptive: bool = _drafters(
        False,
        "let the engine choose each cycle's depth, and chain or tree, from what cycles cost here",
    )

    against: tuple[str, ...] = _what(
        (),
        "another implementation in turns with ours, on the same GGUF file: llama.cpp, or "
        "llama.cpp+lookup[:DEPTH] with its prompt lookup; found as llama-cpp-python or "
        "llama-server, or named after =, such as llama.cpp=http://HOST:PORT; repeatable",
    )
    prompts: tuple[str, ...] = _what((), PROMPTS_HELP)
    limit: Count | None = _what(None, LIMIT_HELP, unset="all")
    temperature: tuple[Annotated[float, Ge(0)], ...] = _what(
        (0.0,), "0 is greedy; repeatable", flags=("-t",)
    )
    batch_size: tuple[Count, ...] = _what((1,), "sequences per batch; repeatable", flags=("-b",))

    engine: Literal["auto", "fast", "reference"] = _how(
        "auto",
        "one loop for all methods: fast is the engine, reference the loop through Transformers; "
        "auto: the first that can run them all",
    )
    max_new_tokens: AtLeastTwo = _how(256, "the longest answer", flags=("-n",))
    shortest_answer: AtLeastTwo = _how(32, "shorter answers are left out and counted")
    repeats: Count = _how(3, "of each prompt; the median counts")
    warm_up: CountOrZero = _how(1, "batches before a cell is timed")
    seed: CountOrZero = _how(0, "prompt i draws from it + i")
    accept: AcceptRule = _how(
        "coupled", "how sampled drafts are accepted; coupled gives plain decoding's own text"
    )

    out: Path | None = setting(
        None,
        "the file of raw records, continued where it ends",
        unset="bench-TARGET-KEY.jsonl in this folder",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        axes = {"temperature": self.temperature, "batch size": self.batch_size}
        for name, values in axes.items():
            if not values:
                raise InputError(f"there is no {name}; give at least one.")
            if len(set(values)) < len(values):
                raise InputError(f"a {name} is given twice: {', '.join(f'{v:g}' for v in values)}.")
        if self.engine == "reference" and self.adaptive:
            raise InputError(
                "only the engine adapts its depth; take the engine, or leave adaptive out."
            )
        return self

    def cells(self, tasks: Sequence[str]) -> list[Cell]:
        """Every task at every temperature with every batch size."""
        return [Cell(*each) for each in itertools.product(tasks, self.temperature, self.batch_size)]

    def protocol(self) -> Protocol:
        """Which prompts and answers count."""
        from domino_spec.evaluation import Protocol

        return Protocol(
            longest_prompt=_LONGEST_PROMPT,
            max_new_tokens=self.max_new_tokens,
            shortest_answer=self.shortest_answer,
            seed=self.seed,
        )

    def params(self, temperature: float) -> SamplingParams:
        """How every method of a cell generates."""
        from domino_spec.decoding import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            seed=self.seed,
            accept=self.accept,
        )

    def same_text(self, temperature: float) -> bool:
        """Whether a seed gives the same text with drafts and without, so that texts compare."""
        return temperature == 0 or self.accept in ("coupled", "match")

    def recorded(self) -> dict[str, Any]:
        """What the key of a run holds; tasks, temperatures and batch sizes join the same file."""
        values = self.model_dump(include=set(_RECORDED))
        return {**values, "longest_prompt": _LONGEST_PROMPT}


class EngineSettings(Settings):
    """What `domino bench engine` measures, over random weights with acceptance forced."""

    shape: str = setting(
        ..., "`qwen3-0.6b`, qwen3-4b, qwen3-8b, llama-3-8b, or a config.json", argument=""
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _engine(
        "bfloat16", "type of the weights"
    )
    quantize: Literal["int8", "int4", "fp8"] | None = _engine(
        None,
        "store the target's layers in few bits, weight-only; floors are of those bytes",
        unset="weights are of the type",
    )
    context: Count = _engine(1024, "tokens already in the cache")
    candidates: Count | None = _engine(
        None, "drafts are chosen among so many base candidates", unset="all tokens"
    )
    rows: tuple[Count, ...] = _engine((1,), "sequences at a time; repeatable")
    tokens_per_cycle: tuple[Annotated[float, Ge(1)], ...] = _engine(
        (7.17, 4.2), "acceptance length to force, labelled so; repeatable"
    )
    reference: bool = _engine(True, "also the Transformers loop")
    device: str | None = setting(None, "`cpu`, cuda, ...", unset="a GPU if any")


def digest(value: object) -> str:
    """A hash of plain values."""
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
