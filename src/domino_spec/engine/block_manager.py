"""Which part of the caches a sequence gets, and what of its prompt is there already.

Contiguous: a sequence owns one slot, room for `capacity` tokens in all layers of both models.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from domino_spec.decoding import Sequence

_ID = array("I").itemsize
_STRIDES = (4096, 256, 16, 1)
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
        self._held: dict[int, tuple[bytes, bool]] = {}
        """Of free slots: the tokens whose states lie there, and whether the drafter has them."""
        self._prompts: dict[int, bytes] = {}
        """Of slots in use, with reuse."""

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
        if self._reuse:
            prompt, slot = pack(sequence.prompt), self._least_wanted()
            found = Allocation(slot, slot, 0)
            if sequence.reuse:
                placed = self._place(prompt, list(running), drafts=drafts)
                if placed is None:
                    return None
                found = placed
            self._prompts[found.slot] = prompt
        self.free.remove(found.slot)
        self._held.pop(found.slot, None)
        sequence.slot = found.slot
        sequence.cached = sequence.computed = found.reused
        return found

    def release(self, sequence: Sequence, *, drafts: bool) -> None:
        """A sequence's slot is free again; what it holds is remembered."""
        if sequence.slot is None:
            return
        slot = sequence.slot
        self.free.append(slot)
        self._prompts.pop(slot, None)
        if self._reuse and (held := sequence.in_cache):
            self._held[slot] = (pack(held), drafts)
        sequence.slot = None

    def forget(self) -> None:
        """What lies in free slots is not what was known of them."""
        self._held.clear()

    def _place(self, prompt: bytes, running: list[Sequence], *, drafts: bool) -> Allocation | None:
        """The slot that holds most of the prompt is taken over if it is free and at least half of
        what it holds is of use; else the beginning is to be copied into the least wanted one.
        """
        # The last token is always computed: the first choice is made from its state.
        most = max(0, len(prompt) // _ID - 1)
        best, source, ready = 0, None, False
        longer = prompt[:_ID]
        for slot, (tokens, drafted) in self._held.items():  # hundreds: one comparison for most
            if drafts and not drafted:
                continue
            if best < most and tokens.startswith(longer):
                best, source = min(common(tokens, prompt, best), most), slot
                longer = prompt[: (best + 1) * _ID]
                ready = 2 * best * _ID >= len(tokens)
            elif not ready and best and 2 * best * _ID >= len(tokens):
                ready = tokens.startswith(longer[:-_ID])
                source = slot if ready else source
        for each in running:
            if each.slot is None or (drafts and not each.speculate):
                continue
            tokens = self._prompts[each.slot][: each.computed * _ID]
            if len(each.output) > 1 and prompt.startswith(tokens):
                tokens += pack(each.output[:-1])
            if best < most and tokens.startswith(longer):
                best, source, ready = min(common(tokens, prompt, best), most), each.slot, False
                longer = prompt[: (best + 1) * _ID]
        if self._soon(prompt, most, running, drafts=drafts) - best >= _WORTH_WAITING:
            return None
        slot = self._least_wanted()
        if source is None or not best:
            return Allocation(slot, slot, 0)
        return Allocation(source if ready else slot, source, best)

    def _soon(self, prompt: bytes, most: int, running: Iterable[Sequence], *, drafts: bool) -> int:
        """Tokens of the prompt's beginning that a prefill under way will have computed."""
        under_way = (
            min(common(self._prompts[each.slot], prompt), most)
            for each in running
            if each.slot is not None
            and each.computed < len(each.prompt)
            and (each.speculate or not drafts)
        )
        return max(under_way, default=0)

    def _least_wanted(self) -> int:
        """An empty slot, or the one freed first."""
        return next((slot for slot in self.free if slot not in self._held), self.free[0])


def pack(tokens: Iterable[int]) -> bytes:
    """Tokens as bytes: prefixes of these are compared at the speed of the memory."""
    return array("I", tokens).tobytes()


def common(left: bytes, right: bytes, known: int = 0) -> int:
    """How many tokens two sequences have in common before they part; the `known` first ones are."""
    start, end = known * _ID, min(len(left), len(right))
    for stride in _STRIDES:
        step = stride * _ID
        while start + step <= end and left[start : start + step] == right[start : start + step]:
            start += step
    return start // _ID
