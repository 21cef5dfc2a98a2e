"""The lean forward as the reference loop wants it: any source of drafts, verified at full speed.

`decoding.loop.decode` runs over this as it does over a `Target`. Prompts are read row by row into
slots. A block to verify is one function of three device tensors (slots, starts, tokens), which on a
GPU is captured in a CUDA graph for each size; other sizes are filled up to one of those, with rows
in a spare slot and with tokens behind a row's own, of which nothing is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.errors import InputError
from domino_spec.fast.admission import PREFILL_CHUNK
from domino_spec.fast.graphs import Recorder, filled_size, sizes_up_to
from domino_spec.fast.kernels.linear import normed
from domino_spec.fast.kernels.runtime import on_device
from domino_spec.fast.rows import Rows
from domino_spec.fast.target import LeanTarget
from domino_spec.targets import Target, TargetOutput


class SlotRows:
    """Rows of one run: the slots they live in, and how many tokens each has there."""

    def __init__(self, rows: int) -> None:
        self.slots = list(range(rows))
        self.lengths = [0] * rows

    def commit(self, counts: Sequence[int]) -> None:
        """Keep so many of each row's last positions; what lies behind is written over."""
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order; each stays in its slot."""
        self.slots = [self.slots[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]


@dataclass(frozen=True)
class Kind:
    """What a verifying forward looks like; each kind is captured once."""

    rows: int
    tokens: int
    """Tokens a row: the anchor and its drafts."""
    taps: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """What it reads: a slot and a start a row, and the tokens."""
        return 2 * self._even + self.rows * self.tokens

    @property
    def _even(self) -> int:
        """Rows rounded up: each part is aligned to 16 bytes, as kernels are compiled for."""
        return self.rows + self.rows % 2

    def parts(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [rows], starts [rows] and tokens [rows, tokens]: views of what is read."""
        rows, second, third = self.rows, self._even, 2 * self._even
        tokens = numbers[third:].view(rows, self.tokens)
        return numbers[:rows], numbers[second : second + rows], tokens


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # [kind.numbers]
    output: TargetOutput


class LeanVerifier:
    """A `decoding.Verifier` over the engine's forward and slots; one run at a time."""

    def __init__(
        self,
        target: Target,
        *,
        slots: int,
        capacity: int,
        depth: int,
        graphs: bool | None = None,
        fill: bool | None = None,
        pack: bool | None = None,
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        """`capacity` is tokens a slot, prompt and answer; `depth` the most drafts of a block.

        `graphs` captures forwards in CUDA graphs; it is on where there is a GPU. `fill` fills
        blocks up to a size that is captured; graphs need it, tests have it without them. `pack` is
        the engine's. `chunk` is how much of a prompt is read at a time.
        """
        on_gpu = target.device.type == "cuda"
        self._graphs = on_gpu if graphs is None else graphs
        self._fill = self._graphs if fill is None else fill
        _check(target, slots, capacity, depth, chunk, graphs=self._graphs, fill=self._fill)
        self.slots, self.capacity, self.depth = slots, capacity, depth
        # What fills a block up reaches behind a row's last token by less than a block.
        sizes = {"slots": slots + 1, "capacity": capacity + depth + 1}
        self.lean = LeanTarget(target, **sizes, pack=not on_gpu if pack is None else pack)
        self._chunk = chunk
        self._rows: SlotRows | None = None
        self._lengths: dict[tuple[int, ...], set[int]] = {}
        """Tokens a row that forwards are filled up to, by what they tap."""
        self._captured: dict[Kind, Captured] = {}
        self._recorder = Recorder()

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.lean.device

    @property
    def spare(self) -> int:
        """The slot of rows that only fill up a batch."""
        return self.slots

    def new_cache(self, rows: int) -> SlotRows:
        """A run begins in the first slots; rows of the run before it are gone."""
        if not 1 <= rows <= self.slots:
            raise InputError(
                f"{rows} rows are to decode together; there are {self.slots} slots. Give fewer "
                "rows at a time, or make the verifier with more slots."
            )
        self._rows = SlotRows(rows)
        return self._rows

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,  # [rows, n]
        cache: SlotRows,
        *,
        taps: Sequence[int] = (),
        keep: Sequence[int] | None = None,
        last_positions: Sequence[int] | None = None,
    ) -> TargetOutput:
        """See `decoding.Verifier`: prompts where `keep` says how long they are, else blocks."""
        if cache is not self._rows:
            raise InputError(
                "another run has begun in these slots; decode one run after the other."
            )
        with on_device(self.device):
            if keep is not None:
                return self._read(tokens, cache, tuple(taps), keep)
            self._check_block(tokens, cache, last_positions)
            return self._verify(tokens, cache, tuple(taps))

    def prepare(self, rows: int, *, depth: int, taps: Sequence[int] = ()) -> None:
        """Ready for blocks of up to so many rows and drafts: where graphs are on, all recorded.

        Otherwise each is recorded at its first use, inside somebody's answer. Blocks grow shorter
        towards a row's end and where a source finds little, so there are a few lengths.
        """
        self._check_depth(depth)
        known = self._known(tuple(taps))
        known.update({2**power for power in range(depth.bit_length())}, {depth + 1})
        if not self._graphs:
            return
        with on_device(self.device):
            # The largest first: smaller ones fit into what it took.
            for size, length in itertools.product(sizes_up_to(rows)[::-1], sorted(known)[::-1]):
                kind = Kind(size, length, tuple(taps))
                if kind not in self._captured:
                    self._capture(kind)

    # Prompts --------------------------------------------------------------------------------

    def _read(
        self, tokens: Tensor, cache: SlotRows, taps: tuple[int, ...], lasts: Sequence[int]
    ) -> TargetOutput:
        """Every row's prompt by itself and without its padding; one product for all logits."""
        lean, width = self.lean, len(taps) * self.lean.shape.hidden
        places = list(zip(cache.slots, cache.lengths, lasts, strict=True))
        self._check_room(max(before + last + 1 for _, before, last in places))
        ends, tapped = [], None
        if taps:
            shape = (*tokens.shape, width)
            tapped = torch.zeros(shape, dtype=lean.dtype, device=self.device)
        for row, (slot, before, last) in enumerate(places):
            prompt = tokens[row, : last + 1].tolist()
            for start in range(0, len(prompt), self._chunk):
                part = prompt[start : start + self._chunk]
                states, found, _ = lean.read(part, slot=slot, start=before + start, taps=taps)
                if tapped is not None:
                    tapped[row, start : start + len(part)] = found
            ends.append(states.rows[-1:])
        logits = lean.logits(normed(torch.cat(ends), lean.norm, lean.shape.eps)).unsqueeze(1)
        # A column for each different end; a row's own logits stand in all of its columns.
        return TargetOutput(logits.expand(-1, len(set(lasts)), -1), tapped)

    # Blocks ---------------------------------------------------------------------------------

    def _verify(self, block: Tensor, cache: SlotRows, taps: tuple[int, ...]) -> TargetOutput:
        rows, count = block.shape
        kind = self._kind(rows, count, taps)
        numbers = self._numbers(kind, block, cache)
        if not self._graphs:
            found = self._run(kind, numbers.to(self.device))
        else:
            captured = self._captured.get(kind) or self._capture(kind)
            captured.numbers.copy_(numbers.pin_memory(), non_blocking=True)
            captured.graph.replay()
            found = captured.output
        logits, tapped = found.logits[:rows, :count], found.taps
        tapped = None if tapped is None else tapped[:rows, :count]
        if self._graphs:  # the next replay writes over what this one left
            logits, tapped = logits.clone(), None if tapped is None else tapped.clone()
        return TargetOutput(logits, tapped)

    def _kind(self, rows: int, count: int, taps: tuple[int, ...]) -> Kind:
        """The kind of forward a block runs in: no smaller than itself."""
        if not self._fill:
            return Kind(rows, count, taps)
        known = self._known(taps)
        # A length that nobody prepared is one from now on: shorter blocks are filled up to it.
        length = min((n for n in known if n >= count), default=count)
        known.add(length)
        return Kind(filled_size(rows), length, taps)

    def _known(self, taps: tuple[int, ...]) -> set[int]:
        # Plain decoding's one token is never filled up, whoever else taps as little as it.
        return self._lengths.setdefault(taps, {1})

    def _numbers(self, kind: Kind, block: Tensor, cache: SlotRows) -> Tensor:
        """All that a forward reads, on the host: one copy takes it to the device."""
        numbers = torch.zeros(kind.numbers, dtype=torch.long)
        slots, starts, tokens = kind.parts(numbers)
        rows, count = block.shape
        slots.fill_(self.spare)
        slots[:rows] = torch.tensor(cache.slots)
        starts[:rows] = torch.tensor(cache.lengths)
        tokens[:rows, :count] = block
        return numbers

    def _run(self, kind: Kind, numbers: Tensor) -> TargetOutput:
        """Logits and taps of whole blocks; on a GPU nothing in here waits for the host."""
        slots, starts, tokens = kind.parts(numbers)
        states, tapped = self.lean.forward(tokens, Rows(slots, starts, kind.tokens), kind.taps)
        shape = (kind.rows, kind.tokens, -1)
        logits = self.lean.logits(states).view(shape)
        return TargetOutput(logits, tapped.view(shape) if kind.taps else None)

    def _capture(self, kind: Kind) -> Captured:
        """Record one forward of this kind in the spare slot; rows in use are not touched."""
        numbers = torch.zeros(kind.numbers, dtype=torch.long, device=self.device)
        kind.parts(numbers)[0].fill_(self.spare)
        graph, output = self._recorder.record(lambda: self._run(kind, numbers))
        self._captured[kind] = Captured(graph, numbers, output)
        return self._captured[kind]

    # Room -----------------------------------------------------------------------------------

    def _check_block(
        self, block: Tensor, cache: SlotRows, last_positions: Sequence[int] | None
    ) -> None:
        count = block.shape[1]
        self._check_depth(count - 1)
        needed = [length + count for length in cache.lengths]
        if last_positions is not None:
            needed = [min(n, last + 1) for n, last in zip(needed, last_positions, strict=True)]
        self._check_room(max(needed))

    def _check_depth(self, depth: int) -> None:
        if depth > self.depth:
            raise InputError(
                f"a block has {depth} drafts; there is room behind a row's end for {self.depth}. "
                "Make the verifier with a larger depth."
            )

    def _check_room(self, needed: int) -> None:
        if needed > self.capacity:
            raise InputError(
                f"a row needs {needed} tokens; a slot holds {self.capacity}. Shorten it, or make "
                "the verifier with a larger capacity."
            )


def _check(
    target: Target, slots: int, capacity: int, depth: int, chunk: int, *, graphs: bool, fill: bool
) -> None:
    """Refuse what could not run as it is asked to."""
    least = {
        "slots": (slots, 1),
        "capacity": (capacity, 1),
        "depth": (depth, 0),
        "chunk": (chunk, 1),
    }
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise InputError(f"{name} is {value}; expected {lowest} or more.")
    if graphs and target.device.type != "cuda":
        raise InputError(
            f"graphs are CUDA's and the target is on {target.device}; leave graphs out."
        )
    if graphs and not fill:
        raise InputError("graphs are captured for a few sizes; they need fill. Leave it out.")
