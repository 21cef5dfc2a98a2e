"""Work on the side stream has scratch memory of its own."""

import weakref
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from domino_spec.engine.kernels import scratch as module
from domino_spec.engine.kernels.scratch import apart, scratch
from domino_spec.engine.model_runner import SideStream


class Stream:
    """Says what waits for what."""

    def __init__(self, name, said, handle=0):
        self.name, self.said, self.cuda_stream = name, said, handle

    def wait_stream(self, other):
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch):
    """What streams of a GPU that is not here were told."""
    heard = []
    current = [Stream("main", heard)]

    @contextmanager
    def stream(entered):
        current.append(entered)
        try:
            yield
        finally:
            current.pop()

    handles = count(1)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda _device: Stream("second", heard, next(handles))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return heard


def test_on_a_cpu_work_is_done_where_it_stands(said):
    stream = SideStream(torch.device("cpu"))
    with stream.work():
        inside = scratch(torch.device("cpu"), parts=3, counters=1)
    stream.join()
    assert said == []
    assert scratch(torch.device("cpu"), parts=3, counters=1) is inside


def test_scratch_is_shared_within_a_stream_and_not_between_them(said, monkeypatch):
    monkeypatch.setattr(module, "_kept", {})
    device, gpu = torch.device("cpu"), torch.device("cuda:0")
    asked = {"parts": 5, "counters": 2}
    outside = scratch(device, **asked)
    first, second = SideStream(gpu), SideStream(gpu)
    with first.work():
        own = scratch(device, **asked)
    with second.work():
        others = scratch(device, **asked)
    with first.work():
        assert scratch(device, **asked) is own
    assert len({id(each) for each in (outside, own, others)}) == 3
    with pytest.raises(ZeroDivisionError), apart(7):
        raise ZeroDivisionError
    assert scratch(device, **asked) is outside


def test_what_the_second_stream_reads_is_kept_until_it_was_waited_for(said):
    stream, read = SideStream(torch.device("cuda:0")), torch.zeros(1)
    kept = weakref.ref(read)
    with stream.work(read):
        pass
    del read
    assert kept() is not None, "else its memory is the first stream's to write to"
    stream.join()
    assert kept() is None
