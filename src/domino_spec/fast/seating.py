"""Which slot a row gets: a free one, best of all one in which its prompt's beginning lies."""

from __future__ import annotations

from collections.abc import Sequence

from domino_spec.decoding import Row, RunStats, SamplingParams
from domino_spec.fast.seats import Seat

_STRIDE = 256


class Seating:
    """Rows in slots, and free slots. With `reuse` it knows what rows that left have left there."""

    def __init__(self, count: int, *, reuse: bool) -> None:
        self.seats: list[Seat] = []
        self.free = list(range(count))[::-1]
        """The one that was left last comes last."""
        self._reuse = reuse
        self._known: dict[int, list[int]] = {}
        """Of free slots: the tokens whose states lie there."""

    @property
    def decoding(self) -> tuple[Seat, ...]:
        """Those whose prompt is read."""
        return tuple(seat for seat in self.seats if not seat.reading)

    def take(
        self, row: Row, params: SamplingParams, run: RunStats | None, *, reuse: bool = True
    ) -> Seat:
        """A free slot for a row. It says where the longest beginning of the prompt lies."""
        slot, source, reused = self._place(row.prompt if reuse else ())
        self.free.remove(slot)
        self._known.pop(slot, None)
        seat = Seat(slot, row, params, run, source=source, reused=reused)
        self.seats.append(seat)
        return seat

    def leave(self, row: Row) -> None:
        """A row's slot is free again."""
        for place, seat in enumerate(self.seats):
            if seat.row is row:
                del self.seats[place]
                self.free.append(seat.slot)
                if self._reuse and seat.known:
                    self._known[seat.slot] = seat.known
                seat.left = True
                return

    def forget(self) -> None:
        """What lies in free slots is not what was known of them."""
        self._known.clear()

    def _place(self, prompt: Sequence[int]) -> tuple[int, int, int]:
        """Slot, source, tokens reused.

        The slot that holds most of the prompt is taken over if it is free and at least half of
        what it holds is of use; else the beginning is to be copied into the least wanted one.
        """
        if not self._reuse:
            return self.free[-1], self.free[-1], 0
        known = self._known | {seat.slot: seat.known for seat in self.seats}
        # The last token is always read: the first choice is made from its state.
        shared = {
            slot: min(common(tokens, prompt), max(0, len(prompt) - 1))
            for slot, tokens in known.items()
        }
        ready = {slot for slot in self._known if 2 * shared[slot] >= len(known[slot])}
        source = max(shared, key=lambda slot: (shared[slot], slot in ready), default=None)
        slot = self._least_wanted()
        if source is None or not shared[source]:
            return slot, slot, 0
        return source if source in ready else slot, source, shared[source]

    def _least_wanted(self) -> int:
        """An empty one, or the one that was left first."""
        return next((slot for slot in self.free if slot not in self._known), self.free[0])


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they part."""
    most = min(len(left), len(right))
    start = 0
    while start < most and left[start : start + _STRIDE] == right[start : start + _STRIDE]:
        start += _STRIDE  # as slices while they agree: prompts are long
    while start < most and left[start] == right[start]:
        start += 1
    return min(start, most)
