"""The queue is fair by work."""

import itertools
import sys
import threading

import pytest

from domino_spec.engine.scheduler import FairQueue


def taken(queue):
    found = []
    while (item := queue.take()) is not None:
        found.append(item)
    return found


def test_one_client_is_first_come_first_served():
    queue = FairQueue()
    for name in "abc":
        queue.put(name, client="x", cost=1)
    assert len(queue) == 3
    assert taken(queue) == ["a", "b", "c"]
    assert len(queue) == 0
    assert queue.take() is None


def test_a_burst_from_one_client_does_not_keep_another_waiting():
    queue = FairQueue()
    for number in range(5):
        queue.put(("greedy", number), client="greedy", cost=10)
    assert queue.take() == ("greedy", 0)
    queue.put(("modest", 0), client="modest", cost=10)
    assert queue.take() == ("modest", 0)
    assert queue.take() == ("greedy", 1)


def test_work_counts_not_number():
    queue = FairQueue()
    for number in range(2):
        queue.put(("long", number), client="long", cost=30)
    for number in range(5):
        queue.put(("short", number), client="short", cost=10)
    assert [name for name, _ in taken(queue)] == [
        "long", "short", "short", "short", "long", "short", "short",
    ]  # fmt: skip


def test_asking_one_by_one_is_no_way_round_the_queue():
    """A client that puts an item whenever its last is taken gains nothing over one long queue."""
    queue = FairQueue()
    for number in range(6):
        queue.put(("busy", number), client="busy", cost=10)
    queue.put("one by one", client="single", cost=10)
    order = []
    for _ in range(6):
        item = queue.take()
        order.append(item if isinstance(item, str) else item[0])
        if item == "one by one":
            queue.put("one by one", client="single", cost=10)
    assert order.count("busy") == 3


def test_who_stayed_away_has_saved_nothing_up():
    queue = FairQueue()
    for number in range(20):
        queue.put(("early", number), client="early", cost=10)
    for _ in range(10):
        queue.take()
    for number in range(10):
        queue.put(("late", number), client="late", cost=10)
    first = [queue.take()[0] for _ in range(6)]
    assert first.count("early") == 3


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_cancelled_never_comes(name):
    queue = FairQueue()
    queue.put("a", client="x", cost=1)
    queue.put("b", client="y", cost=1)
    assert queue.remove(name)
    assert not queue.remove(name)
    assert taken(queue) == [other for other in "ab" if other != name]


def test_nothing_is_kept_of_clients_who_want_nothing():
    queue = FairQueue()
    for number in range(100):
        queue.put(number, client=f"client {number}", cost=5)
    assert sorted(queue.clear()) == list(range(100))
    for number in range(100):
        queue.put(number, client=f"client {number}", cost=5)
        queue.take()
    assert not queue._lines


def test_how_many_wait_can_be_asked_while_clients_come_and_go():
    """Gauges and admission ask from other threads; they must not walk over what changes."""
    queue, stop = FairQueue(), threading.Event()

    def busy():
        for number in itertools.cycle(range(500)):
            if stop.is_set():
                return
            queue.put(number, client=str(number), cost=1)
            if number % 3:
                queue.take()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=busy)
    other.start()
    try:
        for _ in range(20_000):
            assert len(queue) >= 0
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        other.join()
    assert len(queue) == len(queue.clear())
    assert len(queue) == 0
