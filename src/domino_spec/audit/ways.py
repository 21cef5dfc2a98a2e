"""What is audited: anything that decodes rows and says in which forwards it did."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from domino_spec.decoding import Proposer, RowStats, SamplingParams, decode
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine.cycle import Plan
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.prefill import Part
from domino_spec.engine.rows import Rows
from domino_spec.evaluation.runs import make_sequence
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward that a row took part in."""

    start: int
    """Tokens of the row that were in the cache."""
    width: int
    """Tokens a row in this forward."""
    rows: int
    slots: int | None = None
    """Tokens of the longest row in the cache, where rows had different lengths: it takes a mask."""
    kept: int
    """Tokens that stayed in the cache."""

    def holds(self, position: int) -> bool:
        """Whether the logits behind this position were used."""
        return self.start <= position < self.start + self.kept


@dataclass(frozen=True)
class Written:
    """One row as it was decoded."""

    tokens: tuple[int, ...]
    passes: tuple[Pass, ...]
    stats: RowStats


class Way(Protocol):
    """A way of decoding with drafts."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def batch_size(self) -> int:
        """Rows decoded together."""

    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """Decode all prompts; row i draws from the parameters' seed + i."""

    def own_logits(self, ids: Sequence[int], passes: Sequence[Pass]) -> Iterator[Tensor]:
        """Logits behind known text by a forward of its own, nothing if it runs the model's.

        In the last forward's shape behind text read at once, then through all forwards before.
        """


class ReferenceWay:
    """The reference loop with drafts from anywhere."""

    name = "reference"

    def __init__(
        self, target: Target, proposer: Callable[[], Proposer], *, batch_size: int = 8
    ) -> None:
        self._target = target
        self._proposer = proposer
        self.batch_size = 1 if target.batch_refusal else batch_size

    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """In batches, in the given order: rows of different lengths meet."""
        written: list[Written] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = prompts[first : first + self.batch_size]
            rows = [
                make_sequence(first + index, prompt, params, eos=eos)
                for index, prompt in enumerate(batch)
            ]
            written += self._decode(rows)
        return written

    def own_logits(
        self,
        ids: Sequence[int],  # noqa: ARG002
        passes: Sequence[Pass],  # noqa: ARG002
    ) -> Iterator[Tensor]:
        """The loop runs the model's own forward."""
        return iter(())

    def _decode(self, rows: list[Decoded]) -> list[Written]:
        passes: dict[int, list[Pass]] = {row.index: [] for row in rows}
        with _watched(self._target) as forwards:
            verified: Any = None
            for commit in decode(self._target, self._proposer(), rows):
                if verified is None:
                    verified = forwards[-1].cache  # the prefill's; a proposer may have its own
                forward = next(f for f in reversed(forwards) if f.cache is verified)
                row = commit.sequence
                before = len(row.prompt) + len(row.output) - len(commit.tokens)
                prefill = commit.cycle == 0
                passes[row.index].append(
                    Pass(
                        start=0 if prefill else before - 1,
                        width=forward.width,
                        rows=forward.rows,
                        slots=forward.slots,
                        kept=before if prefill else commit.accepted + 1,
                    )
                )
        return [Written(tuple(r.output), tuple(passes[r.index]), r.stats) for r in rows]


class EngineWay:
    """The engine, whose sampling is the coupled rule."""

    name = "fast"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.batch_size = engine.slots.count

    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """Rows come in as slots become free."""
        engine = self._engine
        rows = [
            make_sequence(index, prompt, params, eos=eos) for index, prompt in enumerate(prompts)
        ]
        passes: dict[int, list[Pass]] = {row.index: [] for row in rows}
        with _started(engine) as cycles:
            first: dict[int, int] = {}  # cycle of each row: every one started since is its own too
            for commit in engine.stream(rows):
                row = commit.sequence
                before = len(row.prompt) + len(row.output) - len(commit.tokens)
                if commit.cycle == 0:
                    first[row.index] = (
                        len(cycles) - 1
                    )  # the step that ends a prefill starts a cycle too
                    taken = Pass(start=0, width=before, rows=1, kept=before)
                else:
                    size, width = cycles[first[row.index] + commit.cycle - 1]
                    taken = Pass(start=before - 1, width=width, rows=size, kept=commit.accepted + 1)
                passes[row.index].append(taken)
        return [Written(tuple(r.output), tuple(passes[r.index]), r.stats) for r in rows]

    @torch.no_grad()
    def own_logits(self, ids: Sequence[int], passes: Sequence[Pass]) -> Iterator[Tensor]:
        """The lean forward alone, told where each forward began: no drafts, no commits.

        So nothing that decoding may have got wrong is in it.
        """
        last = next((i for i, each in enumerate(passes) if each.holds(len(ids) - 1)), None)
        if last is None:
            return
        self._engine.forget()  # slots are written over
        shape = passes[last]
        if shape.start:
            self._read(ids, Pass(start=0, width=shape.start, rows=1, kept=shape.start))
        yield self._read(ids, shape)
        if last > 1:  # else the text before was read at once in any case
            for each in passes[:last]:
                self._read(ids, each)
            yield self._read(ids, shape)

    def _read(self, ids: Sequence[int], shape: Pass) -> Tensor:
        """Behind what slot 0 holds; logits behind the forward's last token, or the text's."""
        engine, device = self._engine, self._engine.slots.device
        with on_device(device):
            if shape.start == 0:
                part = Part(0, 0, ids[: shape.width])
                return engine.prefill.logits(engine.prefill.run([part], observed=False))[0].float()
            # Of the other rows only their number matters: no row sees another's states.
            slots = torch.arange(shape.rows, device=device).clamp(max=engine.slots.spare)
            block = torch.tensor([block_of(ids, shape)] * shape.rows, device=device)
            starts = torch.full((shape.rows,), shape.start, device=device)
            states, _ = engine.target.forward(block, Rows(slots, starts, shape.width))
            logits = engine.target.logits(states).view(shape.rows, shape.width, -1)
            return logits[0, min(len(ids) - shape.start, shape.width) - 1].float()


def block_of(ids: Sequence[int], shape: Pass) -> list[int]:
    """The tokens of a forward: the text as far as it goes, then what no earlier token sees."""
    block = list(ids[shape.start : shape.start + shape.width])
    return block + [ids[-1]] * (shape.width - len(block))


@dataclass(frozen=True)
class _Forward:
    cache: Any
    rows: int
    width: int
    slots: int | None


@contextmanager
def _started(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """Writes down every cycle that starts while open: its rows, filled up, and a row's tokens."""
    seen: list[tuple[int, int]] = []
    runner = engine.runner
    plain, watched = runner.start, vars(runner).get("start")

    def start(slots: Sequence[int], plan: Plan) -> Callable[[], Tensor]:
        seen.append((runner.size_of(len(slots)), plan.depth + 1))
        return plain(slots, plan)

    runner.start = start  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del runner.start
        if watched is not None:  # somebody else watches too
            runner.start = watched  # type: ignore[method-assign]


@contextmanager
def _watched(target: Target) -> Iterator[list[_Forward]]:
    """Writes down the shape of every forward while open."""
    seen: list[_Forward] = []
    plain = target.forward

    def forward(tokens: Tensor, cache: Any, **options: Any) -> Any:
        slots = cache.slots if cache.ragged else None
        seen.append(_Forward(cache, tokens.shape[0], tokens.shape[1], slots))
        return plain(tokens, cache, **options)

    target.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del target.forward
