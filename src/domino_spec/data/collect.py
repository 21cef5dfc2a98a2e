"""Checks conversations one by one or a shard at a time, and lays them out flat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from domino_spec.data.examples import BoolArray, TokenArray
from domino_spec.data.report import BadRowCounter, DataReport

_Scalar = TypeVar("_Scalar", bound=np.generic)
EMPTY = "it is empty"
OUTSIDE = "it holds token ids outside the vocabulary"
NOTHING_LEARNT = "no assistant token lies within the maximum length"
NO_ROOM = "its prompt is longer than itself"


@dataclass(frozen=True)
class Flat:
    """Conversations back to back: compact, and any of them is two look-ups away."""

    tokens: TokenArray  # [total]
    supervised: BoolArray  # [total]
    offsets: npt.NDArray[np.int64]  # [conversations + 1]
    source_ids: npt.NDArray[np.int32]  # [conversations]
    source_names: tuple[str, ...]
    cut: BoolArray  # [conversations]

    def report(self, counted: BadRowCounter | None = None, *, unlearnt: int = 0) -> DataReport:
        """Counts of what is here."""
        names = Counter(self.source_ids.tolist())
        return DataReport(
            conversations=len(self.offsets) - 1,
            tokens=int(self.offsets[-1]),
            supervised_tokens=int(self.supervised.sum()),
            cut=int(self.cut.sum()),
            unlearnt_turns=unlearnt,
            sources={self.source_names[index]: names[index] for index in sorted(names)},
            bad={} if counted is None else counted.result(),
        )


class Collector:
    """Gathers what is good, counts what is not."""

    def __init__(
        self, *, vocab_size: int, max_length: int | None = None, limit: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.bad = BadRowCounter()
        self.unlearnt_turns = 0
        self._limit = limit
        self._dtype: type[np.integer] = np.uint16 if vocab_size <= 2**16 else np.int32
        self._count = 0
        self._tokens: list[TokenArray] = []
        self._supervised: list[BoolArray] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._sources: list[npt.NDArray[np.int32]] = []
        self._cut: list[BoolArray] = []
        self._names: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether as many conversations are here as were asked for."""
        return self._limit is not None and self._count >= self._limit

    def add(
        self, tokens: Sequence[int] | TokenArray, supervised: BoolArray, source: str, where: str
    ) -> None:
        """Take one conversation, cut if need be."""
        ids = np.asarray(tokens, dtype=np.int64)
        if not len(ids):
            self.bad.add(EMPTY, where)
            return
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            self.bad.add(OUTSIDE, where)
            return
        is_cut = self.max_length is not None and len(ids) > self.max_length
        ids, learnt = ids[: self.max_length], supervised[: self.max_length]
        if not learnt.any():
            self.bad.add(NOTHING_LEARNT, where)
            return
        self._append(
            ids, learnt, np.array([len(ids)]), np.array([self._name(source)]), np.array([is_cut])
        )

    def add_flat(
        self,
        tokens: TokenArray,
        lengths: npt.NDArray[np.int64],
        prompt_lengths: npt.NDArray[np.int64],
        sources: Sequence[str],
        where: str,
    ) -> None:
        """Take a shard's conversations at once."""
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, self.max_length or np.iinfo(np.int64).max)
        good = lengths > 0
        self._count_bad(EMPTY, ~good, where)
        largest = np.zeros(len(lengths), dtype=np.int64)
        smallest = np.zeros(len(lengths), dtype=np.int64)
        if good.any():
            largest[good] = np.maximum.reduceat(tokens, starts[good])
            smallest[good] = np.minimum.reduceat(tokens, starts[good])
        for reason, wrong in (
            (OUTSIDE, (largest >= self.vocab_size) | (smallest < 0)),
            (NO_ROOM, (prompt_lengths > lengths) | (prompt_lengths < 0)),
            (NOTHING_LEARNT, prompt_lengths >= kept),
        ):
            self._count_bad(reason, good & wrong, where)
            good &= ~wrong
        if self._limit is not None:
            good &= np.cumsum(good) <= self._limit - self._count
        positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
        mask = np.repeat(good, lengths) & (positions < np.repeat(kept, lengths))
        learnt = positions >= np.repeat(prompt_lengths, lengths)
        names = np.array([self._name(str(source)) for source in sources])
        self._append(tokens[mask], learnt[mask], kept[good], names[good], (lengths > kept)[good])

    def result(self) -> Flat:
        """Everything gathered, laid out flat."""
        lengths = _joined(self._lengths, np.int64)
        return Flat(
            tokens=_joined(self._tokens, self._dtype),
            supervised=_joined(self._supervised, np.bool_),
            offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64),
            source_ids=_joined(self._sources, np.int32),
            source_names=tuple(self._names),
            cut=_joined(self._cut, np.bool_),
        )

    def _append(
        self,
        tokens: TokenArray,
        supervised: BoolArray,
        lengths: npt.NDArray[np.int64],
        sources: npt.NDArray[np.integer],
        cut: BoolArray,
    ) -> None:
        self._count += len(lengths)
        self._tokens.append(tokens.astype(self._dtype))
        self._supervised.append(supervised.astype(np.bool_))
        self._lengths.append(lengths.astype(np.int64))
        self._sources.append(sources.astype(np.int32))
        self._cut.append(cut.astype(np.bool_))

    def _name(self, source: str) -> int:
        return self._names.setdefault(source, len(self._names))

    def _count_bad(self, reason: str, wrong: BoolArray, where: str) -> None:
        if wrong.any():
            self.bad.add(reason, f"{where}, row {int(wrong.argmax()) + 1}", int(wrong.sum()))


def _joined(parts: Sequence[npt.NDArray[_Scalar]], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
