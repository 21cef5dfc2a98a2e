"""Which part of the caches a sequence gets, and what of its prompt is there already.

Contiguous: a sequence owns one slot, room for `capacity` tokens in all layers of both models.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from domino_spec.decoding import Sequence

_STRIDE = 256
_WORTH_WAITING = 64
"""Tokens of a common beginning for which a sequence waits while another computes them."""


@dataclass(frozen=True)
class Allocation:
    """Where a sequence's keys and values go, and where its beginning lies."""

    slot: int
    source: int
    """The slot in which the first `reused` tokens of its prompt lie; it may be its own."""
    reused: int


class BlockManager:
    """Slots of the caches. With `reuse` it knows what sequences that left have left there."""

    def __init__(self, count: int, *, reuse: bool) -> None:
        self.count = count
        self.free = list(range(count))[::-1]
        """The slot freed last comes last."""
        self._reuse = reuse
        self._held: dict[int, tuple[list[int], bool]] = {}
        """Of free slots: the tokens whose states lie there, and whether the drafter has them."""

    def allocate(
        self, sequence: Sequence, running: Iterable[Sequence], *, drafts: bool
    ) -> Allocation | None:
        """A free slot for a sequence, best of all one in which its prompt's beginning lies.

        `drafts` says whether the drafter's states are needed too. None where there is no slot, or
        where a running sequence is about to compute a beginning that is worth waiting for.
        """
        if not self.free:
            return None
        found = Allocation(self.free[-1], self.free[-1], 0)
        if self._reuse and sequence.reuse:
            placed = self._place(sequence.prompt, list(running), drafts=drafts)
            if placed is None:
                return None
            found = placed
        elif self._reuse:
            slot = self._least_wanted()
            found = Allocation(slot, slot, 0)
        self.free.remove(found.slot)
        self._held.pop(found.slot, None)
        sequence.slot = found.slot
        sequence.cached = sequence.computed = found.reused
        return found

    def release(self, sequence: Sequence, *, drafts: bool) -> None:
        """A sequence's slot is free again; what it holds is remembered."""
        if sequence.slot is None:
            return
        self.free.append(sequence.slot)
        if self._reuse and (held := sequence.in_cache):
            self._held[sequence.slot] = (held, drafts)
        sequence.slot = None

    def forget(self) -> None:
        """What lies in free slots is not what was known of them."""
        self._held.clear()

    def _place(
        self, prompt: Tokens[int], running: list[Sequence], *, drafts: bool
    ) -> Allocation | None:
        """The slot that holds most of the prompt is taken over if it is free and at least half of
        what it holds is of use; else the beginning is to be copied into the least wanted one.
        """
        known = {s: tokens for s, (tokens, has) in self._held.items() if has or not drafts}
        known |= {
            each.slot: each.in_cache
            for each in running
            if each.slot is not None and (each.speculate or not drafts)
        }
        # The last token is always computed: the first choice is made from its state.
        most = max(0, len(prompt) - 1)
        shared = {slot: min(common(tokens, prompt), most) for slot, tokens in known.items()}
        ready = {s for s in self._held if s in shared and 2 * shared[s] >= len(known[s])}
        source = max(shared, key=lambda slot: (shared[slot], slot in ready), default=None)
        best = 0 if source is None else shared[source]
        if self._soon(prompt, running, drafts=drafts) - best >= _WORTH_WAITING:
            return None
        slot = self._least_wanted()
        if source is None or not best:
            return Allocation(slot, slot, 0)
        return Allocation(source if source in ready else slot, source, best)

    def _soon(self, prompt: Tokens[int], running: list[Sequence], *, drafts: bool) -> int:
        """Tokens of the prompt's beginning that a prefill under way will have computed."""
        under_way = (
            min(common(each.prompt, prompt), max(0, len(prompt) - 1))
            for each in running
            if each.computed < len(each.prompt) and (each.speculate or not drafts)
        )
        return max(under_way, default=0)

    def _least_wanted(self) -> int:
        """An empty slot, or the one freed first."""
        return next((slot for slot in self.free if slot not in self._held), self.free[0])


def common(left: Tokens[int], right: Tokens[int]) -> int:
    """How many tokens two sequences have in common before they part."""
    most = min(len(left), len(right))
    start = 0
    while start < most and left[start : start + _STRIDE] == right[start : start + _STRIDE]:
        start += _STRIDE  # as slices while they agree: prompts are long
    while start < most and left[start] == right[start]:
        start += 1
    return min(start, most)
