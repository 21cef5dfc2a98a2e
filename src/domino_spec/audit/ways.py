"""What is audited: anything that decodes and says in which forwards it did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from domino_spec.decoding import AcceptanceStats, Drafter, SamplingParams, decode
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.model_runner import Plan, PrefillShape, PromptChunk
from domino_spec.evaluation.runs import make_sequence
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward that a sequence took part in."""

    start: int
    """Tokens of the sequence that were in the cache."""
    width: int
    """Tokens a sequence in this forward."""
    batch: int
    slots: int | None = None
    """Cached tokens of the longest sequence, where lengths differ: it takes a mask."""
    kept: int
    """Tokens that stayed in the cache."""
    prefill: PrefillShape | None = None
    """The engine's shape of a forward over parts of prompts; None for any other forward."""

    def holds(self, position: int) -> bool:
        """Whether the logits after this position were used."""
        return self.start <= position < self.start + self.kept


@dataclass(frozen=True)
class Written:
    """One sequence as it was decoded."""

    tokens: tuple[int, ...]
    passes: tuple[Pass, ...]
    stats: AcceptanceStats


class Way(ABC):
    """A way of decoding with drafts."""

    name: str
    batch_size: int
    """Sequences decoded together."""

    @abstractmethod
    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """Decode all prompts; sequence i draws from the parameters' seed + i."""

    def own_logits(self, ids: Sequence[int], passes: Sequence[Pass]) -> Iterator[Tensor]:  # noqa: ARG002
        """Logits after known text by a forward of its own, nothing if it runs the model's.

        In the last forward's shape after text read at once, then through all forwards before.
        """
        return iter(())


class ReferenceWay(Way):
    """The reference loop with drafts from anywhere."""

    name = "reference"

    def __init__(self, target: Target, drafter: Drafter | None, *, batch_size: int = 8) -> None:
        self._target = target
        self._drafter = drafter
        self.batch_size = 1 if target.batch_refusal else batch_size

    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """In batches, in the given order: sequences of different lengths meet."""
        sequences = [make_sequence(i, prompt, params, eos=eos) for i, prompt in enumerate(prompts)]
        starts = range(0, len(prompts), self.batch_size)
        batches = (sequences[first : first + self.batch_size] for first in starts)
        return [written for batch in batches for written in self._decode(batch)]

    def _decode(self, sequences: list[Decoded]) -> list[Written]:
        passes: dict[int, list[Pass]] = {sequence.index: [] for sequence in sequences}
        with _watched(self._target) as forwards:
            verified: Any = None
            for commit in decode(self._target, self._drafter, sequences):
                if verified is None:
                    verified = forwards[-1][0]  # the prefill's cache; a drafter may have its own
                _, batch, width, slots = next(f for f in reversed(forwards) if f[0] is verified)
                sequence = commit.sequence
                before = len(sequence.prompt) + len(sequence.output) - len(commit.tokens)
                prefill = commit.cycle == 0
                passes[sequence.index].append(
                    Pass(
                        start=0 if prefill else before - 1,
                        width=width,
                        batch=batch,
                        slots=slots,
                        kept=before if prefill else commit.accepted + 1,
                    )
                )
        return [Written(tuple(r.output), tuple(passes[r.index]), r.stats) for r in sequences]


class EngineWay(Way):
    """The engine, whose sampling is the coupled rule."""

    name = "fast"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.batch_size = engine.slots.count

    def write(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, eos: Collection[int]
    ) -> list[Written]:
        """Sequences come in as slots become free."""
        engine = self._engine
        sequences = [
            make_sequence(index, prompt, params, eos=eos) for index, prompt in enumerate(prompts)
        ]
        passes: dict[int, list[Pass]] = {sequence.index: [] for sequence in sequences}
        with _started(engine) as started:
            for commit in engine.stream(sequences):
                sequence = commit.sequence
                if commit.error is not None:
                    raise commit.error
                prefill, cycles = started[sequence.index]
                if commit.cycle == 0:
                    if sequence.cached:  # by another sequence's forwards
                        passes[sequence.index].append(_at_once(sequence.cached))
                    passes[sequence.index] += prefill
                    continue
                before = len(sequence.prompt) + len(sequence.output) - len(commit.tokens)
                size, width = cycles[commit.cycle - 1]
                passes[sequence.index].append(
                    Pass(start=before - 1, width=width, batch=size, kept=commit.accepted + 1)
                )
        return [Written(tuple(r.output), tuple(passes[r.index]), r.stats) for r in sequences]

    @torch.no_grad()
    def own_logits(self, ids: Sequence[int], passes: Sequence[Pass]) -> Iterator[Tensor]:
        """The inference model alone, given where each forward began: no drafts, no commits.

        So nothing that decoding may have got wrong is in it.
        """
        last = next((i for i, each in enumerate(passes) if each.holds(len(ids) - 1)), None)
        if last is None:
            return
        self._engine.forget()  # slots are written over
        shape = passes[last]
        before = [_at_once(shape.start)] if shape.start else []
        for each in before:
            self._read(ids, each)
        yield self._read(ids, shape)
        if list(passes[:last]) != before:
            for each in passes[:last]:
                self._read(ids, each)
            yield self._read(ids, shape)

    def _read(self, ids: Sequence[int], shape: Pass) -> Tensor:
        """After what slot 0 holds; logits after the forward's last token, or the text's."""
        engine, device = self._engine, self._engine.slots.device
        runner = engine.runner
        with on_device(device):
            part = PromptChunk(0, shape.start, ids[shape.start : shape.start + shape.kept])
            if shape.prefill is not None:
                alone = replace(shape.prefill, drafts=False, common=False)
                return runner.logits(runner.run_prefill([part], alone))[0].float()
            if shape.start == 0:
                return runner.logits(runner.prefill([part], drafts=False))[0].float()
            # Of the other sequences only their number matters: none sees another's states.
            slots = torch.arange(shape.batch, device=device).clamp(max=engine.slots.spare)
            block = torch.tensor([block_of(ids, shape)] * shape.batch, device=device)
            starts = torch.full((shape.batch,), shape.start, device=device)
            ends = torch.arange(shape.batch, device=device) * shape.width + shape.kept - 1
            metadata = AttentionMetadata(slots, starts, shape.width, ends=ends)
            states, _ = engine.target.forward(block, metadata)
            logits = engine.target.logits(states).view(shape.batch, shape.width, -1)
            return logits[0, min(len(ids) - shape.start, shape.width) - 1].float()


def block_of(ids: Sequence[int], shape: Pass) -> list[int]:
    """The tokens of a forward: the text as far as it goes, then what no earlier token sees."""
    block = list(ids[shape.start : shape.start + shape.width])
    return block + [ids[-1]] * (shape.width - len(block))


_Started = tuple[list[Pass], list[tuple[int, int]]]
"""What the engine launched for one sequence: forwards over its prompt, then for each cycle the
sequences, filled up, and tokens of each."""


def _at_once(count: int) -> Pass:
    """The text's beginning in one forward of its own."""
    return Pass(start=0, width=count, batch=1, kept=count)


@contextmanager
def _started(engine: Engine) -> Iterator[dict[int, _Started]]:
    """Writes down every forward that starts while open, for each sequence that takes part in it."""
    seen: dict[int, _Started] = defaultdict(lambda: ([], []))
    runner = engine.runner
    start_cycle, run_prefill = runner.start_cycle, runner.run_prefill

    def forwards_of(slots: Iterable[int]) -> Iterator[_Started]:
        running = {sequence.slot: sequence.index for sequence in engine.scheduler.running}
        return (seen[running[slot]] for slot in slots)

    def start(slots: Sequence[int], plan: Plan) -> Callable[[], Tensor]:
        for _, cycles in forwards_of(slots):
            cycles.append((runner.size_of(len(slots)), (plan.nodes or plan.depth) + 1))
        return start_cycle(slots, plan)

    def prefill(parts: Sequence[PromptChunk], shape: PrefillShape) -> Tensor:
        of_parts = forwards_of(part.slot for part in parts)
        for (passes, _), part in zip(of_parts, parts, strict=True):
            passes.append(
                Pass(
                    start=part.start,
                    width=shape.count,
                    batch=shape.sequences,
                    kept=len(part.tokens),
                    prefill=shape,
                )
            )
        return run_prefill(parts, shape)

    with _replaced(runner, "start_cycle", start), _replaced(runner, "run_prefill", prefill):
        yield seen


@contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """An object with another method while open, and afterwards as it was."""
    before = vars(owner).get(name)  # others may watch it too
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextmanager
def _watched(target: Target) -> Iterator[list[tuple[Any, int, int, int | None]]]:
    """Writes down every forward while open: its cache, sequences, tokens of each, and slots."""
    seen: list[tuple[Any, int, int, int | None]] = []
    plain = target.forward

    def forward(tokens: Tensor, cache: Any, **options: Any) -> Any:
        seen.append((cache, *tokens.shape, cache.slots if cache.ragged else None))
        return plain(tokens, cache, **options)

    with _replaced(target, "forward", forward):
        yield seen
