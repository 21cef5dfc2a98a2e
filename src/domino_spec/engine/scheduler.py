"""Which sequences run in a step: who gets a slot, whose prompt is computed, who decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from domino_spec.decoding import Sequence
from domino_spec.engine.block_manager import Allocation, BlockManager
from domino_spec.engine.fair import FairQueue


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


@dataclass(frozen=True)
class Schedule:
    """What one step runs."""

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    """Those whose prompt ends in this step are among them."""


class Scheduler:
    """Orders every caller's sequences: fair between clients, first come first served in each."""

    def __init__(self, blocks: BlockManager, *, drafts: Callable[[Sequence], bool]) -> None:
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

    def schedule(self, *, budget: int, alone: int) -> Schedule:
        """Chunks of up to `budget` prompt tokens (`alone` where nothing decodes), and who decodes.

        Running sequences wait for a step's chunks, so a long prompt is computed in several steps.
        """
        found = Schedule()
        pending: list[Sequence] = []
        for sequence in self.running:
            whole = sequence.computed >= len(sequence.prompt)
            (found.decode if whole else pending).append(sequence)
        left = budget if found.decode else max(alone, budget)
        for sequence in pending:
            if left <= 0:
                break
            remaining = len(sequence.prompt) - sequence.computed
            chunk = Chunk(sequence, sequence.computed, min(remaining, left))
            left -= chunk.count
            found.prefill.append(chunk)
            if chunk.last:
                found.decode.append(sequence)
        return found
