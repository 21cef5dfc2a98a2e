"""Where the worker could lose somebody: half a turn, a meter that fails, two lanes, two threads."""

import threading
import time
import weakref

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.asks import BusyError, Ended, Failed, StoppingError
from domino_spec.serving.worker import Worker
from tests.serving.fakes import Counts, ScriptedLane, job
from tests.serving.test_worker import working


def test_who_ended_in_a_turn_that_raised_later_hears_of_the_end():
    class Late(ScriptedLane):
        """Its rows commit, and leave at their end; then the turn fails."""

        def turn(self, results):
            super().turn(results)
            if self.turns == 1:
                raise RuntimeError("out of luck")

    with working(Late()) as worker:
        short, heard_short = job(0, tokens=1)
        long, heard_long = job(1, tokens=9)
        worker.submit([short, long])
        assert heard_short.end.reason == "length"
        assert heard_short.tokens == [0]
        assert isinstance(heard_long.end, Failed)
        assert heard_long.tokens == [1]
        assert worker.state == "ready"


@pytest.mark.parametrize("deaf", ["queue", "first_token", "block", "ended"])
def test_a_meter_that_fails_costs_nobody_an_answer(deaf):
    def broken(*_facts, **_more):
        raise OSError("no room for numbers")

    meter = Counts()
    setattr(meter, deaf, broken)
    with working(ScriptedLane(), meter=meter) as worker:
        for number in range(3):
            only, heard = job(number, tokens=3)
            worker.submit([only])
            assert isinstance(heard.end, Ended)
        assert worker.state == "ready"


class Exit(BaseException):
    """Not an error that anybody handles."""


@pytest.mark.parametrize("where", ["begin", "turn"])
def test_whatever_ends_the_worker_everybody_hears_of_it(where):
    class Fatal(ScriptedLane):
        def _begin(self, job):
            if where == "begin" and job.row.index == 1:
                raise Exit

        def turn(self, results):
            super().turn(results)
            raise Exit

    with working(Fatal(slots=2)) as worker:
        pairs = [job(number, tokens=1 if number == 0 else 9) for number in range(4)]
        worker.submit([each for each, _ in pairs])
        worker.join()
        ends = [heard.end for _, heard in pairs]
        if where == "turn":
            assert isinstance(ends.pop(0), Ended)
        assert all(isinstance(end.error, StoppingError) for end in ends)
        assert worker.state == "failed"


# How many may wait --------------------------------------------------------------------------------


def test_free_slots_of_another_lane_are_no_room():
    lane, plain = ScriptedLane(slots=1), ScriptedLane(slots=4)
    with working(lane, lambda: plain, max_queue=1) as worker:
        opening, heard = job(0, tokens=1, speculate=False)
        worker.submit([opening])
        assert isinstance(heard.end, Ended)
        lane.gated = True
        worker.submit([job(1)[0], job(2)[0]])  # a slot and a place in the queue
        with pytest.raises(BusyError):
            worker.submit([job(3)[0]])
        worker.submit([job(4, speculate=False)[0]])  # its own lane is idle


def test_a_lane_that_is_not_made_yet_has_room():
    lane, plain = ScriptedLane(slots=1), ScriptedLane(slots=1)
    lane.gated = True
    worker = Worker(lane, lambda: plain, max_queue=0, meter=Counts())  # not started: nobody leaves
    worker.submit([job(0)[0]])
    with pytest.raises(BusyError):
        worker.submit([job(1)[0]])
    worker.submit([job(2, speculate=False)[0]])
    with pytest.raises(BusyError):
        worker.submit([job(3, speculate=False)[0]])


def test_who_is_on_the_way_to_a_slot_counts():
    class Slow(ScriptedLane):
        def __init__(self):
            super().__init__(slots=1)
            self.called, self.go = threading.Event(), threading.Event()

        def _begin(self, job):
            self.called.set()
            assert self.go.wait(30)

    lane = Slow()
    with working(lane, max_queue=0) as worker:
        first, heard = job(0, tokens=1)
        worker.submit([first])
        assert lane.called.wait(30)
        try:
            with pytest.raises(BusyError):
                worker.submit([job(1)[0]])
        finally:
            lane.go.set()
        assert isinstance(heard.end, Ended)


def test_retry_after_is_by_the_time_of_an_answer_not_of_the_queue():
    """Thirty answers of two seconds, one at a time: the last has waited for a minute."""

    class Clock:
        now = 0.0

    class Timed(ScriptedLane):
        def turn(self, results):
            Clock.now += 2.0
            super().turn(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: Clock.now)
        worker = Worker(Timed(slots=1), None, max_queue=100, meter=Counts())
        pairs = [job(number, tokens=1) for number in range(30)]
        worker.submit([each for each, _ in pairs])
        worker.start()
        assert all(isinstance(heard.end, Ended) for _, heard in pairs)
        worker.drain(0)
        worker.join()
    assert 1.5 < worker._mean_seconds <= 2.0


# Two lanes on one device --------------------------------------------------------------------------


def test_lanes_that_run_ahead_share_the_device_by_time():
    """A device does what it is given in order; a lane waits for its last cycle, not for this."""

    class Device:
        host = idle_at = 0.0

    class Ahead(ScriptedLane):
        def __init__(self, seconds):
            super().__init__(slots=1)
            self.seconds, self.used, self.lands_at = seconds, 0.0, None

        def turn(self, results):
            Device.host += 0.01
            landing, self.lands_at = self.lands_at, max(Device.idle_at, Device.host) + self.seconds
            Device.idle_at = self.lands_at
            self.used += self.seconds
            Device.host = max(Device.host, landing or 0.0)
            super().turn(results)

        def settle(self, results):
            Device.host = max(Device.host, self.lands_at or 0.0)
            self.lands_at = None

    drafting, plain = Ahead(3.0), Ahead(1.0)
    shares = []
    drafting.trouble = lambda lane: shares.append(plain.used)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: Device.host)
        worker = Worker(drafting, lambda: plain, max_queue=10, meter=Counts())
        first, heard = job(0, tokens=40)
        second, heard_plain = job(1, tokens=120, speculate=False)
        worker.submit([first, second])
        worker.start()
        assert isinstance(heard.end, Ended)
        assert isinstance(heard_plain.end, Ended)
        worker.drain(0)
        worker.join()
    assert shares[-1] == pytest.approx(drafting.used, rel=0.1)


def test_a_lane_that_has_worked_long_is_not_behind_one_that_begins_while_it_rests():
    class Clock:
        now = 0.0

    log = []

    class Timed(ScriptedLane):
        def turn(self, results):
            Clock.now += 1.0
            log.append(self)
            super().turn(results)

    drafting, plain = Timed(slots=1), Timed(slots=1)
    plain.gated = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: Clock.now)
        with working(drafting, lambda: plain) as worker:
            before, heard = job(0, tokens=500)
            worker.submit([before])
            assert isinstance(heard.end, Ended)
            long, heard_long = job(1, tokens=400, speculate=False)
            worker.submit([long])
            plain.gate.release(3)
            assert heard_long.first.wait(30)
            late, heard_late = job(2, tokens=20)
            worker.submit([late])
            plain.gate.release(1000)
            assert isinstance(heard_late.end, Ended)
            assert isinstance(heard_long.end, Ended)
    ended = max(turn for turn, lane in enumerate(log) if lane is drafting)
    assert log[500:ended].count(plain) < 40


# What an error holds ------------------------------------------------------------------------------


class Much:
    """Something large that a cycle had in hand."""


def raising(kept):
    much = Much()
    kept.append(weakref.ref(much))
    try:
        raise KeyError("inside")
    except KeyError as error:
        raise RuntimeError("no room") from error


@pytest.mark.parametrize("where", ["turn", "row", "begin"])
def test_an_error_that_is_told_holds_nothing_of_what_failed(where):
    kept, at_reset = [], []

    class Lane(ScriptedLane):
        def _begin(self, job):
            if where == "begin":
                raising(kept)

        def turn(self, results):
            if where == "row":
                for job in self.jobs():
                    try:
                        raising(kept)
                    except RuntimeError as error:
                        results.failures.append((job, error))
                    self.release(job)
                return
            raising(kept)

        def reset(self):
            at_reset.extend(each() for each in kept)
            super().reset()

    with working(Lane()) as worker:
        only, heard = job(0)
        worker.submit([only])
        assert isinstance(heard.end.error.__cause__, RuntimeError)  # the log and a debugger may ask
        assert [each() for each in kept] == [None]
        assert at_reset == ([None] if where == "turn" else [])


def test_a_lane_of_two_rows_gets_twice_the_time_of_a_lane_of_one():
    log = []

    class Clock:
        now = 0.0

    class Timed(ScriptedLane):
        def turn(self, results):
            Clock.now += 1.0
            log.append(self)
            super().turn(results)

    drafting, plain = Timed(slots=2), Timed(slots=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: Clock.now)
        worker = Worker(drafting, lambda: plain, max_queue=10, meter=Counts())
        pairs = [job(0, tokens=60), job(1, tokens=60), job(2, tokens=60, speculate=False)]
        worker.submit([each for each, _ in pairs])
        worker.start()
        assert all(isinstance(heard.end, Ended) for _, heard in pairs)
        worker.drain(0)
        worker.join()
    ended = max(turn for turn, lane in enumerate(log) if lane is drafting)
    assert 25 <= log[:ended].count(plain) <= 35


def test_who_is_sent_away_is_told_how_long_the_line_is():
    for queue, seconds in ((9, 11.0), (400, 120.0)):  # one slot, one second each; two minutes most
        worker = Worker(ScriptedLane(slots=1), None, max_queue=queue, meter=Counts())
        worker.submit([job(number)[0] for number in range(queue + 1)])
        with pytest.raises(BusyError) as caught:
            worker.submit([job(999)[0]])
        assert caught.value.retry_after == seconds


def test_what_could_never_be_taken_is_refused_for_good():
    worker = Worker(ScriptedLane(slots=2), None, max_queue=1, meter=Counts())
    with pytest.raises(InputError, match="4 answers are asked for at once; this server takes 3"):
        worker.submit([job(number)[0] for number in range(4)])
    worker.submit([job(number)[0] for number in range(3)])
    with pytest.raises(BusyError):
        worker.submit([job(number)[0] for number in range(3)])
