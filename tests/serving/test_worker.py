"""The worker: who joins, who leaves, what breaks and what goes on."""

import contextlib
import threading
import time

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.asks import BusyError, DecodingError, Ended, Failed, StoppingError
from domino_spec.serving.worker import Worker
from tests.serving.fakes import Counts, ScriptedLane, job


@contextlib.contextmanager
def working(lane, plain=None, *, max_queue=100, meter=None):
    worker = Worker(lane, plain, max_queue=max_queue, meter=meter or Counts())
    worker.start()
    try:
        yield worker
    finally:
        lane.gate.release(10_000)
        worker.drain(0)
        worker.join()
        assert worker.running == 0
        assert worker.waiting == 0


def test_answers_come_block_by_block_and_end():
    meter = Counts()
    with working(ScriptedLane(), meter=meter) as worker:
        first, heard = job(7, tokens=3)
        worker.submit([first])
        assert heard.end.reason == "length"
        assert heard.tokens == [7, 7, 7]
    assert meter.ends == ["length"]
    assert meter.firsts == 1
    assert meter.drafts == 4  # two cycles of two
    assert meter.gauges[-1] == (0, 0, 2)


def test_a_row_joins_between_cycles_and_commits_before_an_earlier_one_ends():
    lane = ScriptedLane()
    lane.gated = True
    with working(lane) as worker:
        early, heard_early = job(0, tokens=50)
        worker.submit([early])
        lane.gate.release(3)
        assert heard_early.first.wait(30)
        late, heard_late = job(1, tokens=2)
        worker.submit([late])
        lane.gate.release(6)
        assert heard_late.end.reason == "length"
        assert not early.over
        lane.gate.release(100)
        assert heard_early.end.reason == "length"


def test_what_is_cancelled_frees_its_slot_before_the_next_cycle():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    meter = Counts()
    with working(lane, meter=meter) as worker:
        long, heard = job(0, tokens=1_000_000)
        waiting, heard_waiting = job(1, tokens=1)
        worker.submit([long])
        worker.submit([waiting])
        lane.gate.release()
        assert heard.first.wait(30)
        worker.cancel([long])
        lane.gate.release(2)  # the turn under way, and one of the row that waited
        assert heard_waiting.end.reason == "length"
        assert long.over
    assert len(heard.tokens) <= 2
    assert meter.ends.count("cancelled") == 1


def test_what_is_cancelled_in_the_queue_never_begins():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane) as worker:
        first, heard = job(0, tokens=2)
        second, never = job(1, tokens=2)
        worker.submit([first])
        worker.submit([second])
        worker.cancel([second])
        lane.gate.release(10)
        assert heard.end.reason == "length"
    assert lane.began == [0]
    assert not never.events


def test_a_stop_rule_that_raises_fails_its_own_answer_only():
    def bad(row):
        raise ZeroDivisionError("in a rule")

    with working(ScriptedLane()) as worker:
        good, heard = job(0, tokens=5)
        broken, heard_broken = job(1, tokens=5, rules=[bad])
        worker.submit([good, broken])
        assert isinstance(heard_broken.end, Failed)
        assert isinstance(heard_broken.end.error, DecodingError)
        assert "ZeroDivisionError" in str(heard_broken.end.error)
        assert "in a rule" not in str(heard_broken.end.error), "internals stay inside"
        assert heard.end.reason == "length"
        assert heard.tokens == [0] * 5


def test_a_cycle_that_raises_loses_its_rows_and_nobody_elses():
    def once(lane):
        if lane.turns == 2:
            raise RuntimeError("out of luck")

    lane = ScriptedLane(slots=1, trouble=once)
    with working(lane) as worker:
        lost, heard_lost = job(0, tokens=10)
        next_one, heard = job(1, tokens=3)
        worker.submit([lost])
        worker.submit([next_one])
        assert isinstance(heard_lost.end, Failed)
        assert heard.end.reason == "length"
        assert worker.state == "ready"
    assert lane.resets == 1


def test_a_lane_that_cannot_be_made_anew_is_the_end_and_says_so():
    def always(lane):
        raise RuntimeError("dead")

    class Dead(ScriptedLane):
        def reset(self):
            raise RuntimeError("still dead")

    with working(Dead(trouble=always)) as worker:
        only, heard = job(0)
        worker.submit([only])
        assert isinstance(heard.end, Failed)
        worker.join()
        assert worker.state == "failed"
        with pytest.raises(StoppingError, match="cannot decode any more"):
            worker.submit([job(1)[0]])


def test_what_cannot_begin_fails_with_its_own_words():
    class Choosy(ScriptedLane):
        def _begin(self, job):
            if job.row.index == 0:
                raise InputError("the row is 0; expected more.")

    with working(Choosy()) as worker:
        bad, heard_bad = job(0)
        good, heard = job(1)
        worker.submit([bad, good])
        assert str(heard_bad.end.error) == "the row is 0; expected more."
        assert heard.end.reason == "length"


def test_the_queue_is_bounded_and_all_of_a_request_is_taken_or_none():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane, max_queue=2) as worker:
        jobs = [job(number)[0] for number in range(5)]
        worker.submit(jobs[:3])  # one slot and two places in the queue
        with pytest.raises(BusyError, match="limit of 2") as caught:
            worker.submit(jobs[3:])
        assert 1 <= caught.value.retry_after <= 120
        assert worker.waiting + worker.running == 3


def test_no_queue_at_all_takes_what_a_free_slot_takes():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane, max_queue=0) as worker:
        first, heard = job(0, tokens=1)
        worker.submit([first])
        with pytest.raises(BusyError):
            worker.submit([job(1)[0]])
        lane.gate.release(10)
        assert heard.end.reason == "length"


def test_another_client_does_not_wait_for_a_crowd():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane) as worker:
        crowd = [job(number, tokens=1, client="crowd")[0] for number in range(10)]
        worker.submit(crowd)
        modest, heard = job(99, tokens=1, client="modest")
        worker.submit([modest])
        lane.gate.release(3)
        assert heard.end.reason == "length"
        assert lane.began.index(99) <= 2


def test_draining_finishes_what_runs_and_waits_and_takes_nothing_new():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane) as worker:
        running, heard = job(0, tokens=3)
        waiting, heard_waiting = job(1, tokens=3)
        worker.submit([running])
        worker.submit([waiting])
        worker.drain(60)
        assert worker.state == "stopping"
        with pytest.raises(StoppingError, match="going down"):
            worker.submit([job(2)[0]])
        lane.gate.release(20)
        assert heard.end.reason == "length"
        assert heard_waiting.end.reason == "length"
        worker.join()


def test_at_the_deadline_what_is_left_ends_with_an_error():
    lane = ScriptedLane(slots=1)
    lane.gated = True
    with working(lane) as worker:
        running, heard = job(0, tokens=1_000_000)
        waiting, heard_waiting = job(1)
        worker.submit([running])
        worker.submit([waiting])
        lane.gate.release(2)
        assert heard.first.wait(30)
        worker.drain(0)
        lane.gate.release(2)
        for listener in (heard, heard_waiting):
            assert isinstance(listener.end.error, StoppingError)
        worker.join()


@pytest.mark.parametrize("before", [None, True, False])
def test_lanes_share_the_machine_by_time_not_by_turns(before):
    """A turn of the first lane takes three times as long: it gets a third of the turns.

    `before`: which lane had the machine for itself, long before; that is neither debt nor credit.
    """

    log = []

    class Clock:
        now = 0.0

    class Timed(ScriptedLane):
        def __init__(self, seconds):
            super().__init__(slots=1)
            self.seconds = seconds

        def turn(self, results):
            Clock.now += self.seconds
            log.append(self)
            super().turn(results)

    drafting, plain = Timed(3.0), Timed(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: Clock.now)
        worker = Worker(drafting, lambda: plain, max_queue=10, meter=Counts())
        worker.start()
        if before is not None:
            old, heard_old = job(7, tokens=500, speculate=before)
            old.asked = Clock.now
            worker.submit([old])
            assert isinstance(heard_old.end, Ended)
            log.clear()
        first, heard = job(0, tokens=40)
        second, heard_plain = job(1, tokens=120, speculate=False)
        first.asked = second.asked = Clock.now
        worker.submit([first, second])
        assert isinstance(heard.end, Ended)
        assert isinstance(heard_plain.end, Ended)
        worker.drain(0)
        worker.join()
    ended = max(turn for turn, lane in enumerate(log) if lane is drafting)
    assert log[:ended].count(drafting) == 39
    assert 110 <= log[:ended].count(plain) <= 120


def test_a_plain_lane_is_made_when_first_wanted_and_its_failure_is_its_own():
    made = []

    def make():
        made.append(True)
        if len(made) == 1:
            raise MemoryError
        return ScriptedLane()

    with working(ScriptedLane(), make) as worker:
        drafting, heard = job(0)
        worker.submit([drafting])
        assert isinstance(heard.end, Ended)
        assert not made
        first, heard_first = job(1, speculate=False)
        worker.submit([first])
        assert isinstance(heard_first.end, Failed)
        second, heard_second = job(2, speculate=False)
        worker.submit([second])
        assert isinstance(heard_second.end, Ended)


def test_the_thread_ends():
    before = threading.active_count()
    with working(ScriptedLane()) as worker:
        only, heard = job(0)
        worker.submit([only])
        assert isinstance(heard.end, Ended)
    assert threading.active_count() == before
