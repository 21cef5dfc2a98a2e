"""Which side gets which request when, on a clock that jumps."""

import asyncio
import itertools

import pytest

from domino_spec.load.runner import Runner, arrivals
from domino_spec.load.settings import LoadSettings, Side
from domino_spec.load.summary import summarise
from tests.load.clock import run

ONE, TWO = (Side(name=name, url="http://x", model="m") for name in ("one", "two"))


class Server:
    """Answers after so many seconds, one at a time if it is slow that way."""

    def __init__(self, seconds, *, in_line=False):
        self.seconds, self.asked, self.now, self.most = seconds, [], 0, 0
        self.lock = asyncio.Lock() if in_line else None

    async def __call__(self, side, number, trace):
        loop = asyncio.get_running_loop()
        trace.sent = loop.time()
        self.asked.append((side.name, number))
        self.now += 1
        self.most = max(self.most, self.now)
        if self.lock is None:
            await self.answer(trace)
        else:
            async with self.lock:
                await self.answer(trace)
        self.now -= 1

    async def answer(self, trace):
        loop = asyncio.get_running_loop()
        for _ in range(2):
            await asyncio.sleep(self.seconds / 2)
            trace.chunk_times.append(loop.time())
            trace.chunk_tokens.append(5)
        trace.ended, trace.status = loop.time(), 200


def load(**settings):
    return LoadSettings(url="http://x", **settings)


def measured(server, settings, sides=(ONE,)):
    kept = [{"kind": "run", "run": "r", "settings": settings.recorded(),
             "sides": [{"name": side.name} for side in sides]}]  # fmt: skip

    def keep(record):
        kept.append({"run": "r", **record})

    assert run(Runner(sides, settings, server, keep).run())
    return kept, summarise(kept)[0]


def test_a_closed_loop_keeps_its_concurrency():
    server = Server(2.0)
    kept, summary = measured(server, load(concurrency=[4], requests=12, warm_up=0))
    assert server.most == 4
    assert [number for _, number in server.asked] == list(range(12))
    (side,) = summary.cells[0].sides
    assert side.seconds == pytest.approx(6.0)
    assert side.requests_per_second == pytest.approx(2.0)
    assert side.tokens_per_second == side.full_tokens_per_second == pytest.approx(20.0)
    assert side.times["first_token"].mean == pytest.approx(1.0)
    assert side.times["latency"].p50 == pytest.approx(2.0)
    assert side.times["inter_token"].samples == 12 * 5
    assert side.times["inter_token"].mean == pytest.approx(0.2)
    assert [r["kind"] for r in kept[1:]] == ["request"] * 12 + ["round"]


def test_no_request_of_a_closed_loop_starts_after_its_seconds():
    server = Server(2.0)
    _, summary = measured(server, load(concurrency=[3], seconds=5.0, warm_up=0))
    assert len(server.asked) == 9  # at 0, 2 and 4 seconds
    assert summary.cells[0].sides[0].seconds == pytest.approx(6.0)


def test_a_slow_server_is_not_waited_for_at_a_rate():
    """One answer takes as long as ten arrivals: latency grows from request to request."""
    server = Server(1.0, in_line=True)
    kept, summary = measured(server, load(rate=[10.0], requests=30, warm_up=0, seed=3))
    due = list(arrivals(10.0, seed=3, requests=30))
    records = [r for r in kept if r["kind"] == "request"]
    assert [r["scheduled"] for r in records] == pytest.approx(due, abs=1e-5)
    assert [r["sent"] for r in records] == pytest.approx(due, abs=1e-5)
    # The k-th answer ends k+1 seconds after the first began.
    ends = [due[0] + k + 1 for k in range(30)]
    (side,) = summary.cells[0].sides
    expected = sum(end - at for end, at in zip(ends, due, strict=True)) / 30
    assert side.times["latency"].mean == pytest.approx(expected, abs=1e-4)
    assert server.most > 20
    assert side.full_tokens_per_second is None


def test_what_the_client_sends_late_counts_from_when_it_was_due():
    async def main():
        loop = asyncio.get_running_loop()
        kept, sent = [], []

        async def send(side, number, trace):
            if not sent:
                loop._selector.now += 5.0  # the client itself stood still
            sent.append(number)
            trace.sent = trace.ended = loop.time()

        await Runner([ONE], load(rate=[4.0], requests=4, warm_up=0), send, kept.append).run()
        return [r for r in kept if r["kind"] == "request"]

    records = run(main())
    due = list(arrivals(4.0, seed=0, requests=4))
    assert [r["scheduled"] for r in records] == pytest.approx(due, abs=1e-5)
    late = [r["ended"] - r["scheduled"] for r in records]
    assert late == pytest.approx([due[0] + 5.0 - at for at in due], abs=1e-5)


def test_arrivals_are_a_poisson_process_of_the_seed():
    found = list(arrivals(8.0, seed=1, requests=None, seconds=500.0))
    assert found == list(arrivals(8.0, seed=1, requests=None, seconds=500.0))
    assert found != list(arrivals(8.0, seed=2, requests=None, seconds=500.0))
    assert len(found) == pytest.approx(4000, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # as an exponential's is
    assert found[-1] <= 500


def test_sides_take_turns_and_ask_the_same():
    server = Server(1.0)
    settings = load(concurrency=[1], requests=2, warm_up=1, rounds=3)
    kept, summary = measured(server, settings, sides=(ONE, TWO))
    assert server.asked == [
        ("one", -1), ("two", -1),  # warm-up
        ("one", 0), ("one", 1), ("two", 0), ("two", 1),
        ("two", 2), ("two", 3), ("one", 2), ("one", 3),
        ("one", 4), ("one", 5), ("two", 4), ("two", 5),
    ]  # fmt: skip
    assert [r["warm_up"] for r in kept[1:5]] == [True] * 4
    assert [side.requests for side in summary.cells[0].sides] == [6, 6]
    found = summary.cells[0].comparison
    assert (found.rounds, found.same, found.compared) == (3, 6, 6)
    assert found.tokens_per_second.value == pytest.approx(1.0)
    assert found.tokens_per_second.low is None  # three rounds are too few to draw from


def test_warm_up_is_as_many_as_the_load_unless_told():
    server = Server(1.0)
    measured(server, load(concurrency=[4], requests=8))
    assert [number for _, number in server.asked][:5] == [-1, -2, -3, -4, 0]


def test_an_interrupted_run_keeps_what_it_has():
    def stop(cell, side, done, total):
        assert total == 40
        if done == 6:
            task.cancel()

    async def main():
        nonlocal task
        task = asyncio.current_task()
        return await Runner([ONE, TWO], settings, Server(1.0), kept.append, stop).run()

    task, kept, settings = None, [], load(concurrency=[4], requests=40, warm_up=0)
    assert run(main()) is False
    requests = [r for r in kept if r["kind"] == "request"]
    assert len(requests) >= 8
    assert sum(r["error"] is None for r in requests) >= 6
    assert {r["error"] for r in requests} == {None, "interrupted"}
    (last,) = [r for r in kept if r["kind"] == "round"]
    assert not last["complete"]
    facts = {"kind": "run", "settings": settings.recorded(), "sides": [{"name": "one"}]}
    (summary,) = summarise([{**r, "run": "r"} for r in (facts, *kept)])
    (side,) = summary.cells[0].sides
    assert side.interrupted > 0
    assert side.errors == {}
    assert side.completed + side.interrupted == side.requests
