"""Which part of the caches a sequence gets, and what of its prompt is there already.

Contiguous on a CPU: a sequence owns one slot, room for `capacity` tokens in all layers of both
models. In pages on a GPU: it owns as many as it has tokens for, and shares those of its beginning.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from domino_spec.decoding import Sequence
from domino_spec.engine.cache import PageTable

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

    @property
    def usage(self) -> float:
        """The share of the slots that sequences have."""
        return (self.count - len(self.free)) / max(1, self.count)

    def extend(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that have room for their next cycle: all, since a slot is as long as allowed."""
        return sequences

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
        soon = soon_computed(prompt, most, self._prompts, running, drafts=drafts)
        if soon - best >= _WORTH_WAITING:
            return None
        slot = self._least_wanted()
        if source is None or not best:
            return Allocation(slot, slot, 0)
        return Allocation(source if ready else slot, source, best)

    def _least_wanted(self) -> int:
        """An empty slot, or the one freed first."""
        return next((slot for slot in self.free if slot not in self._held), self.free[0])


@dataclass
class _Holding:
    """What a running sequence has."""

    pages: list[int]
    last: int
    """Pages that it may have at its end."""
    drafted: bool
    """Whether the drafter's states are in its pages too."""
    own: int = 0
    """Pages that nobody has shared: they are free once it ends."""
    known: int = 0
    """Pages that others can find."""
    serial: int = 0
    """Of the last of these."""


class PageManager:
    """Pages of the caches, given out as sequences grow. With `reuse` whole pages are shared.

    A sequence for which there is no page sits out until there is. None does so for ever: pages are
    given out only as long as there is an order in which all can end, each with what those before it
    give back (the banker's algorithm).
    """

    def __init__(
        self, count: int, table: PageTable, *, margin: int, reuse: bool, reads_next: bool = False
    ) -> None:
        """`count` sequences at a time, after whose tokens cycles may write to `margin` places.

        With `reads_next` what a drafter keeps of a token is made from the one after it too.
        """
        self.count, self.table = count, table
        self.free = list(range(count))[::-1]
        self._margin, self._reuse, self._reads_next = margin, reuse, reads_next
        self._held: dict[int, _Holding] = {}
        self._prompts: dict[int, bytes] = {}
        self._shares: Counter[int] = Counter()
        """Of pages in use, how many sequences have them."""
        self._owners: dict[int, int] = {}
        """The slot of a page that one sequence alone has had."""
        self._empty = list(range(1, table.count))[::-1]
        self._idle: dict[int, None] = {}
        """Free pages that can be found; the one freed first comes first."""
        self._found: dict[tuple[int, bytes], int] = {}
        """A page by its tokens and the serial number of the page before it."""
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._serials: dict[int, int] = {}
        self._drafted: set[int] = set()
        self._last_serial = 0

    def allocate(
        self, sequence: Sequence, running: Iterable[Sequence], *, drafts: bool
    ) -> Allocation | None:
        """A slot and the prompt's pages, those that exist already shared with who has them.

        None where there is no slot or too few pages, or where a running sequence is about to
        compute pages that are worth waiting for.
        """
        if not self.free:
            return None
        page, shared = self.table.page, list[int]()
        prompt = pack(sequence.prompt) if self._reuse else b""
        if self._reuse and sequence.reuse:
            running = list(running)
            for each in running:
                self._publish(each)
            shared = list(self._matching(prompt, drafts=drafts))
            if self._reads_next:  # the last one's last token was followed by another's
                shared = shared[:-1]
            most = len(sequence.prompt) - 1
            soon = soon_computed(prompt, most, self._prompts, running, drafts=drafts)
            if soon // page > len(shared):
                return None
        needed = self._pages_for(sequence) - len(shared)
        last = self._pages(sequence.max_length)
        spare = self._spare - needed - sum(each in self._idle for each in shared)
        lost = Counter(self._owners[each] for each in shared if each in self._owners)
        more = (last - needed - len(shared), needed)
        # A page more for each, or those that run would soon sit out.
        if spare < len(self._held) or not self._all_can_end(spare, lost, more):
            return None
        slot = self.free.pop()
        for found in shared:
            self._idle.pop(found, None)
            if found in self._owners:
                self._held[self._owners.pop(found)].own -= 1
        pages = shared + [self._take() for _ in range(needed)]
        self._shares.update(pages)
        self._owners |= dict.fromkeys(pages[len(shared) :], slot)
        serial = self._serials[shared[-1]] if shared else 0
        self._held[slot] = _Holding(pages, last, drafts, needed, len(shared), serial)
        self._prompts[slot] = prompt
        self.table.clear(slot)
        self.table.put(slot, 0, pages)
        sequence.slot = slot
        sequence.cached = sequence.computed = len(shared) * page
        return Allocation(slot, slot, sequence.cached)

    def extend(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that have pages for their next cycle, or get them; the others sit it out."""
        return [sequence for sequence in sequences if self._extend(sequence)]

    def release(self, sequence: Sequence, *, drafts: bool) -> None:  # noqa: ARG002
        """A sequence's pages are free again, unless others share them; what it filled is known."""
        if sequence.slot is None:
            return
        self._publish(sequence)
        slot, sequence.slot = sequence.slot, None
        self.free.append(slot)
        self._prompts.pop(slot)
        for page in reversed(self._held.pop(slot).pages):  # beginnings are wanted most
            self._owners.pop(page, None)
            self._shares[page] -= 1
            if not self._shares[page]:
                del self._shares[page]
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def forget(self) -> None:
        """No page is found again, and free slots have pages to write to, as measurements do."""
        for page in list(self._keys):
            self._unpublish(page)
        for each in self._held.values():
            each.known = each.serial = 0
        self._empty += self._idle
        self._idle.clear()
        width, count = self.table.width, self.table.count - 1
        for slot in self.free if count > 0 else ():
            first = slot * width
            self.table.put(slot, 0, (1 + (first + place) % count for place in range(width)))
        self.table.send()

    @property
    def usage(self) -> float:
        """The share of the pages that sequences hold."""
        pages = self.table.count - 1
        return (pages - self._spare) / max(1, pages)

    @property
    def _spare(self) -> int:
        return len(self._empty) + len(self._idle)

    def _pages(self, tokens: int) -> int:
        return -(-(tokens + self._margin) // self.table.page)

    def _pages_for(self, sequence: Sequence) -> int:
        """Pages for a sequence's next cycle."""
        length = len(sequence.prompt) + len(sequence.output)
        return self._pages(min(length, sequence.max_length))

    def _extend(self, sequence: Sequence) -> bool:
        assert sequence.slot is not None
        held = self._held[sequence.slot]
        needed = self._pages_for(sequence) - len(held.pages)
        if needed <= 0:
            return True
        held.own += needed
        first = len(held.pages)
        held.pages += [0] * needed
        spare = self._spare - needed
        if spare < 0 or not self._all_can_end(spare):
            held.own -= needed
            del held.pages[first:]
            return False
        held.pages[first:] = pages = [self._take() for _ in range(needed)]
        self._shares.update(pages)
        self._owners |= dict.fromkeys(pages, sequence.slot)
        self.table.put(sequence.slot, first, pages)
        return True

    def _all_can_end(
        self, spare: int, lost: Counter[int] | None = None, more: tuple[int, int] | None = None
    ) -> bool:
        """Whether so many spare pages let one sequence after the other get all it may ask for.

        `lost` are pages that slots' sequences are about to share; `more` is a further sequence:
        pages that it will need, and those that it owns.
        """
        lost = Counter() if lost is None else lost
        wants = [
            (held.last - len(held.pages), held.own - lost[slot])
            for slot, held in self._held.items()
        ]
        if more is not None:
            wants.append(more)
        if sum(need for need, _ in wants) <= spare:
            return True
        for need, own in sorted(wants):
            if need > spare:
                return False
            spare += own
        return True

    def _take(self) -> int:
        """A free page; of those that could be found the one freed first."""
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._idle))
        del self._idle[page]
        self._unpublish(page)
        return page

    def _matching(self, prompt: bytes, *, drafts: bool) -> Iterator[int]:
        """Pages that hold the prompt's beginning; its last token is always computed."""
        serial, step = 0, self.table.page * _ID
        for start in range(0, len(prompt) - step, step):
            page = self._found.get((serial, prompt[start : start + step]))
            if page is None or (drafts and page not in self._drafted):
                return
            serial = self._serials[page]
            yield page

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the pages that a sequence has filled."""
        if not self._reuse or sequence.slot is None:
            return
        held, page = self._held[sequence.slot], self.table.page
        prompt, output = len(sequence.prompt), sequence.output
        filled = sequence.computed
        if filled >= prompt:
            filled = prompt + max(0, len(output) - 1)
        while (held.known + 1) * page <= filled:
            start = held.known * page
            tokens = sequence.prompt[start : start + page]
            tokens = tokens + output[max(0, start - prompt) : max(0, start + page - prompt)]
            key, own = (held.serial, pack(tokens)), held.pages[held.known]
            known = self._found.get(key)
            if known is None or (held.drafted and known not in self._drafted):
                if known is not None:
                    self._unpublish(known)
                    if known in self._idle:
                        del self._idle[known]
                        self._empty.append(known)
                self._last_serial += 1
                self._found[key], self._keys[own] = own, key
                self._serials[own] = self._last_serial
                if held.drafted:
                    self._drafted.add(own)
                known = own
            held.serial = self._serials[known]
            held.known += 1

    def _unpublish(self, page: int) -> None:
        del self._found[self._keys.pop(page)], self._serials[page]
        self._drafted.discard(page)


def soon_computed(
    prompt: bytes,
    most: int,
    prompts: dict[int, bytes],
    running: Iterable[Sequence],
    *,
    drafts: bool,
) -> int:
    """Tokens of a prompt's beginning that a prefill under way will have computed."""
    under_way = (
        min(common(prompts[each.slot], prompt), most)
        for each in running
        if each.slot is not None
        and each.computed < len(each.prompt)
        and (each.speculate or not drafts)
    )
    return max(under_way, default=0)


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
