"""Conversations packed into rows of one length, epoch after epoch, resumable at any batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domino_spec.data.corpus import Corpus
from domino_spec.errors import DataError

_WINDOW = 8192
"""Conversations packed together: enough to fill rows, few enough to keep an epoch shuffled."""
_ORDER, _ROWS, _CONCATENATED = 0, 1, 2


_BEFORE = {"concatenate": 0.0}
"""What positions in the data meant that were written before they named it."""


@dataclass
class Batch:
    """Rows of packed conversations; nothing may attend from one document to another.

    In a concatenated row all conversations are one document.
    """

    tokens: Tensor  # int64 [rows, length]
    documents: Tensor  # int64 [rows, length]; 0, 1, ... in each row, -1 on padding
    positions: Tensor  # int64 [rows, length]; from 0 in each document, counting on over padding
    supervised: Tensor  # bool [rows, length]
    conversations: int


def plan_epoch(
    lengths: npt.NDArray[np.int64], *, length: int, seed: int, epoch: int
) -> list[list[int]]:
    """Which conversations share a row in this epoch: nothing but these numbers decides it."""
    lengths = np.minimum(lengths, length)
    shuffled = _shuffled(len(lengths), seed, epoch, _ORDER)
    rows: list[list[int]] = []
    for start in range(0, len(shuffled), _WINDOW):
        window = shuffled[start : start + _WINDOW]
        longest_first = window[np.argsort(-lengths[window], kind="stable")]
        rows += _best_fit(longest_first.tolist(), lengths[longest_first].tolist(), length)
    return [rows[index] for index in _shuffled(len(rows), seed, epoch, _ROWS)]


def _best_fit(indices: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each into the row it fills best; rows are kept by their room, rooms in a bit mask."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0
    for index, needed in zip(indices, lengths, strict=True):
        fitting = rooms >> needed
        if fitting:
            room = needed + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        by_room.setdefault(room - needed, []).append(row)
        rooms |= 1 << (room - needed)
    return rows


def _shuffled(count: int, seed: int, epoch: int, purpose: int) -> npt.NDArray[np.intp]:
    # Raw bits of a bit generator never change between NumPy versions, its permutations may.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose])).random_raw(count)
    return np.argsort(bits, kind="stable")


class PackedBatches:
    """Endless batches. A rank takes its part of each global batch of rows * world rows."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        rows: int,
        length: int,
        seed: int,
        pad_token: int,
        concatenate: float = 0.0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value, least in (
            ("rows", rows, 1), ("length", length, 2), ("seed", seed, 0), ("world", world, 1),
        ):  # fmt: skip
            if value < least:
                raise DataError(f"{name} is {value}; expected {least} or more.")
        if not 0.0 <= concatenate <= 1.0:
            raise DataError(f"concatenate is {concatenate}; expected a share from 0 to 1.")
        if not 0 <= rank < world:
            raise DataError(f"rank is {rank}; expected 0 to {world - 1}.")
        self.corpus = corpus
        self.rows, self.length, self.seed = rows, length, seed
        self.pad_token, self.rank, self.world = pad_token, rank, world
        self.concatenate = concatenate
        """Share of the rows whose conversations follow one another as one document."""
        over = np.flatnonzero(corpus.lengths > length)
        late = [index for index in over if corpus.first_supervised(int(index)) >= length]
        self.cut = len(over) - len(late)
        """Conversations of which only the first `length` tokens are used."""
        self.left_out = len(late)
        """Conversations whose first learnt token lies after that."""
        self._usable = np.setdiff1d(np.arange(len(corpus)), late)
        if not len(self._usable):
            raise DataError(
                f"none of {len(corpus)} conversations has an assistant token within {length} "
                "tokens; pack longer rows."
            )
        self._lengths = corpus.lengths[self._usable]
        self._at(epoch=0, row=0)

    @property
    def epoch(self) -> int:
        """The epoch of the next row."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every conversation of this epoch was seen, counted from its start."""
        return math.ceil(len(self._plan) / (self.rows * self.world))

    @property
    def padding_share(self) -> float:
        """How much of this epoch's rows is padding."""
        used = int(np.minimum(self._lengths, self.length).sum())
        return 1 - used / (len(self._plan) * self.length)

    def next(self) -> Batch:
        """The next batch; where an epoch ends within it, the next one's rows follow."""
        rows = [self._next_row() for _ in range(self.rows * self.world)]
        return self._batch(rows[self.rank * self.rows : (self.rank + 1) * self.rows])

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and what that is true for."""
        return {**self._identity(), "epoch": self._epoch, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken; another corpus or shape is refused."""
        for name, own in self._identity().items():
            if state.get(name, _BEFORE.get(name)) != own:
                raise DataError(
                    f"this position in the data belongs to {name} {state.get(name)!r}, but this "
                    f"run has {own!r}; go on with the same data and settings, or start anew."
                )
        epoch, row = int(state["epoch"]), int(state["row"])
        self._at(epoch=epoch, row=row)
        if not 0 <= row < len(self._plan):
            raise DataError(
                f"the position names row {row} of {len(self._plan)}; the state is damaged."
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "concatenate": self.concatenate,
            "fingerprint": self.corpus.fingerprint,
            "length": self.length,
            "rows": self.rows,
            "seed": self.seed,
            "world": self.world,
        }

    def _at(self, *, epoch: int, row: int) -> None:
        self._epoch, self._row = epoch, row
        self._plan = plan_epoch(self._lengths, length=self.length, seed=self.seed, epoch=epoch)
        drawn = _shuffled(len(self._plan), self.seed, epoch, _CONCATENATED)
        self._concatenated = drawn < round(self.concatenate * len(drawn))

    def _next_row(self) -> tuple[list[int], bool]:
        """Its conversations, and whether they are one document."""
        row = self._plan[self._row], bool(self._concatenated[self._row])
        self._row += 1
        if self._row == len(self._plan):
            self._at(epoch=self._epoch + 1, row=0)
        return row

    def _batch(self, rows: list[tuple[list[int], bool]]) -> Batch:
        shape = (len(rows), self.length)
        tokens = np.full(shape, self.pad_token, dtype=np.int64)
        documents = np.full(shape, -1, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        supervised = np.zeros(shape, dtype=np.bool_)
        counting = np.arange(self.length)
        for number, (row, concatenated) in enumerate(rows):
            start = 0
            for document, index in enumerate(row):
                example = self.corpus[int(self._usable[index])]
                end = start + min(len(example), self.length)
                tokens[number, start:end] = example.tokens[: self.length]
                supervised[number, start:end] = example.supervised[: self.length]
                documents[number, start:end] = 0 if concatenated else document
                first = 0 if concatenated else start
                positions[number, first:] = counting[: self.length - first]
                start = end
        return Batch(
            tokens=torch.from_numpy(tokens),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
            supervised=torch.from_numpy(supervised),
            conversations=sum(len(row) for row, _ in rows),
        )
