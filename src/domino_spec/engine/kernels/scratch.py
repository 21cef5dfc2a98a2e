"""Memory that the programs of one launch share: partial results, and counters of arrivals.

Some kernels spread one result over several programs. Each writes its part here and then counts
itself in; the last to arrive finishes the work, always in the same order, and sets the counter
back to zero. So one launch does the work of two, and every launch finds its counters at zero.

Launches that run one after the other may share. What is launched concurrently, in
another stream (`model_runner.SideStream`), uses memory of its own: `apart`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Key = tuple[torch.device, torch.dtype, int, int, int]

_kept: dict[Key, tuple[Tensor, Tensor]] = {}
_apart: ContextVar[int] = ContextVar("apart", default=0)


@contextmanager
def apart(stream: int) -> Iterator[None]:
    """Inside, scratch is that of another stream, by its handle, and of no other."""
    token = _apart.set(stream)
    try:
        yield
    finally:
        _apart.reset(token)


def scratch(
    device: torch.device, *, parts: int, counters: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Room for this many partial results, and counters at zero.

    Kept for ever: a captured graph holds the address. What is first asked for during a capture is
    not kept, for its zeros are written by that graph alone (and by every replay of it).
    """
    key = (device, dtype, parts, counters, _apart.get())
    found = _kept.get(key)
    if found is None:
        found = (
            torch.empty(parts, device=device, dtype=dtype),
            torch.zeros(counters, device=device, dtype=torch.int32),
        )
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _kept[key] = found
    return found
