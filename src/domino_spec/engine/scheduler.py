"""Which sequences run in a step: who gets a slot, whose prompt is computed, who decodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from domino_spec.decoding import Sequence
from domino_spec.engine.block_manager import Allocation, BlockManager, PageManager

T = TypeVar("T")
Manager = BlockManager | PageManager


@dataclass
class _Line(Generic[T]):
    """One client's items, in the order in which they came."""

    served: float
    """Work it was given; whose number is least is next."""
    items: deque[tuple[T, float]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """A line a client; what a client takes counts against it while others wait.

    Fair by work, not by number: one item of a thousand tokens weighs as much as ten of a hundred.
    Who asks for one thing at a time pays for it as one who asks for all at once; who stayed away
    has saved nothing up.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._clock = 0.0  # how much those who wait have been served
        self._count = 0  # kept, not counted: other threads ask while lines come and go

    def __len__(self) -> int:
        return self._count

    def put(self, item: T, *, client: str, cost: float) -> None:
        """After the client's own items; `cost` is the work it will be."""
        line = self._lines.setdefault(client, _Line(self._clock))
        if not line.items:
            line.served = max(line.served, self._clock)
        line.items.append((item, cost))
        self._count += 1

    def peek(self) -> T | None:
        """What `take` would give, left where it is."""
        line = self._next()
        return None if line is None else line.items[0][0]

    def _next(self) -> _Line[T] | None:
        waiting = (line for line in self._lines.values() if line.items)
        return min(waiting, key=lambda each: each.served, default=None)

    def take(self) -> T | None:
        """The next item of the client served least; None if there is none."""
        line = self._next()
        if line is None:
            return None
        item, cost = line.items.popleft()
        self._count -= 1
        self._clock = line.served
        line.served += cost
        self._forget()
        return item

    def __iter__(self) -> Iterator[T]:
        return (item for line in list(self._lines.values()) for item, _ in list(line.items))

    def remove(self, item: T) -> bool:
        """Take an item out, wherever it stands; whether it was here."""
        for line in self._lines.values():
            for place, (found, _) in enumerate(line.items):
                if found is item:
                    del line.items[place]
                    self._count -= 1
                    self._forget()
                    return True
        return False

    def clear(self) -> list[T]:
        """Everything out."""
        items = [item for line in self._lines.values() for item, _ in line.items]
        self._lines.clear()
        self._count = 0
        return items

    def _forget(self) -> None:
        """Keep nothing of clients who neither wait nor are ahead of those who do."""
        idle = not any(line.items for line in self._lines.values())
        for client, line in list(self._lines.items()):
            if idle or (not line.items and line.served <= self._clock):
                del self._lines[client]


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt to be computed."""

    sequence: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.start + self.count >= len(self.sequence.prompt)

    @property
    def scored(self) -> bool:
        """Whether the prompt's own log-probabilities are wanted."""
        return self.sequence.params.prompt_logprobs is not None


@dataclass(frozen=True)
class Schedule:
    """What one step runs."""

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    """Those whose prompt ends in this step are among them; not those that must sit out."""


class Scheduler:
    """Orders every caller's sequences: fair between clients, first come first served in each."""

    def __init__(self, blocks: Manager, *, drafts: Callable[[Sequence], bool]) -> None:
        """`drafts` says whether drafts are made for a sequence."""
        self.blocks = blocks
        self.waiting: FairQueue[Sequence] = FairQueue()
        self.running: list[Sequence] = []
        self._drafts = drafts

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, after those of its client."""
        self.waiting.put(sequence, client=sequence.client, cost=sequence.max_length)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; harmless for one that is not here."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.blocks.release(sequence, drafts=self._drafts(sequence))

    def admit(self, capacity: int) -> list[tuple[Sequence, Allocation]]:
        """Give slots to waiting sequences, in their order, as far as there are any.

        One that needs more than `capacity` tokens waits, and all others with it.
        """
        admitted = []
        while (sequence := self.waiting.peek()) is not None and sequence.max_length <= capacity:
            drafts = self._drafts(sequence)
            found = self.blocks.allocate(sequence, self.running, drafts=drafts)
            if found is None:
                break
            self.waiting.take()
            self.running.append(sequence)
            admitted.append((sequence, found))
        return admitted

    def schedule(self, *, budget: int, alone: int, pairs: int) -> Schedule:
        """Chunks of up to `budget` prompt tokens (`alone` where nothing decodes), and who decodes.

        Their number times the longest sequence's length is at most `pairs`, but for a
        step's first token. Running sequences wait for a step's chunks, so a long prompt is computed
        in several steps.
        """
        found = Schedule()
        pending: list[Sequence] = []
        for sequence in self.running:
            whole = sequence.computed >= len(sequence.prompt)
            (found.decode if whole else pending).append(sequence)
        left = budget if found.decode else max(alone, budget)
        tokens = longest = 0
        for sequence in pending:
            start, remaining = sequence.computed, len(sequence.prompt) - sequence.computed
            fitting = most_fitting(start, tokens=tokens, longest=longest, pairs=pairs)
            chunk = Chunk(sequence, start, min(remaining, left, max(fitting, not tokens)))
            if chunk.count <= 0:
                break
            left -= chunk.count
            tokens, longest = tokens + chunk.count, max(longest, start + chunk.count)
            found.prefill.append(chunk)
            if chunk.last:
                found.decode.append(sequence)
        found.decode[:] = self.blocks.extend(found.decode)
        return found


def most_fitting(start: int, *, tokens: int, longest: int, pairs: int) -> int:
    """The largest chunk at such a start in a step that computes so many tokens already.

    That is the largest c with (tokens + c) * max(longest, start + c) at most `pairs`.
    """
    within = pairs // max(longest, 1) - tokens
    if start + within <= longest:
        return within
    # (tokens + c) * (start + c) = pairs
    return (math.isqrt((start - tokens) ** 2 + 4 * pairs) - start - tokens) // 2
