"""Work of a cycle that is not waited for until its end, in a CUDA stream of its own.

The update of the draft cache depends on the target's states alone. Concurrently with the target's
last product, which is one long read, its short kernels cost next to nothing; after it they would
begin and end one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from domino_spec.engine.kernels.scratch import apart


class SideStream:
    """A second stream on a GPU; on CPUs the work is done where it stands."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._under_way = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, launches go to the second stream, after all that the current one has so far.

        The caller calls `join` too, whatever happens between: until then the second stream may read
        memory that the current one owns, and a capture that it takes part in cannot end.
        """
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._under_way = True
        with torch.cuda.stream(self._stream), apart(self._stream.cuda_stream):
            yield

    def join(self) -> None:
        """What is launched from here on sees that work done.

        Without any, nothing is waited for: a graph that is being captured must not look at a stream
        that has no part in it.
        """
        if self._under_way:
            assert self._stream is not None
            self._under_way = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
