"""Work beside the current stream: in order, joined once, with scratch of its own."""

from contextlib import contextmanager

import pytest
import torch

from domino_spec.fast.beside import Beside
from domino_spec.fast.kernels import scratch as module
from domino_spec.fast.kernels.scratch import apart, scratch


class Stream:
    """Says what waits for what."""

    def __init__(self, name, said):
        self.name, self.said = name, said

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

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream("second", heard))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return heard


def test_it_begins_behind_the_current_stream_and_is_waited_for_once(said):
    beside = Beside(torch.device("cuda:0"))
    with beside.work():
        said.append("work")
    said.append("main's own")
    beside.join()
    beside.join()
    assert said == ["second waits for main", "work", "main's own", "main waits for second"]


def test_without_work_nothing_is_waited_for(said):
    """A stream that has no part in a capture would end it."""
    beside = Beside(torch.device("cuda:0"))
    beside.join()
    with beside.work():
        pass
    beside.join()
    del said[:]
    beside.join()
    assert said == []


def test_work_that_failed_is_not_waited_for(said):
    beside = Beside(torch.device("cuda:0"))
    with pytest.raises(ZeroDivisionError), beside.work():
        raise ZeroDivisionError
    del said[:]
    beside.join()
    assert said == []
    with beside.work():
        said.append("again")
    beside.join()
    assert said[-2:] == ["again", "main waits for second"]


def test_on_a_cpu_work_is_done_where_it_stands(said):
    beside = Beside(torch.device("cpu"))
    with beside.work():
        inside = scratch(torch.device("cpu"), parts=3, counters=1)
    beside.join()
    assert said == []
    assert scratch(torch.device("cpu"), parts=3, counters=1) is inside


def test_scratch_is_shared_on_either_side_and_not_between_them(said, monkeypatch):
    monkeypatch.setattr(module, "_kept", {})
    device = torch.device("cpu")
    asked = {"parts": 5, "counters": 2}
    outside = scratch(device, **asked)
    with Beside(torch.device("cuda:0")).work():
        beside = scratch(device, **asked)
        assert scratch(device, **asked) is beside
    assert beside is not outside
    assert scratch(device, **asked) is outside
    with pytest.raises(ZeroDivisionError), apart():
        raise ZeroDivisionError
    assert scratch(device, **asked) is outside
