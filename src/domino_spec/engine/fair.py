"""Who is next: the client who was served least, not the one who asked most."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


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
