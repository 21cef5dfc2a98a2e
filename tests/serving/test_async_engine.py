"""One thread, one engine, many callers: who is taken, who leaves, what fails and what goes on."""

import asyncio
import contextlib
import random
import statistics
import threading
import time
import weakref

import pytest
import torch

from domino_spec.decoding import SamplingParams, Sequence, SequenceOutput, TokenScore, merged
from domino_spec.drafters import drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.engine.reference import ReferenceEngine
from domino_spec.errors import InputError
from domino_spec.serving import async_engine
from domino_spec.serving.async_engine import AsyncEngine, OutputStream
from domino_spec.serving.errors import DecodingError, QueueFullError, ShuttingDownError
from tests.serving.fakes import Counts, FakeEngine, request
from tests.serving.live import tiny_decoder
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import run


@contextlib.contextmanager
def serving(engine, *, max_queue=100, metrics=None):
    """An engine at work, which must be empty when it is over."""
    found = AsyncEngine(engine, max_queue=max_queue, metrics=metrics or Counts())
    found.start()
    try:
        yield found
    finally:
        if isinstance(engine, FakeEngine):
            engine.gate.release(10_000)
        found.drain(0)
        found.join()
        assert (found.running, found.waiting) == (0, 0)


def requests(count, **options):
    """Sequences with indices from 0, and their listeners."""
    sequences, listeners = zip(*(request(index, **options) for index in range(count)), strict=True)
    return list(sequences), list(listeners)


def soon(true):
    """Whether it comes to be: what another thread does is waited for, not timed."""
    return any(true() or threading.Event().wait(0.005) for _ in range(4000))


# Sequences come and go ----------------------------------------------------------------------------


def test_outputs_come_step_by_step_and_are_counted():
    metrics = Counts()
    with serving(FakeEngine(), metrics=metrics) as engine:
        sequence, heard = request(7, tokens=3)
        engine.submit([sequence])
        assert heard.reason == "length"
        assert [output.tokens for output in heard.outputs] == [(7,)] * 3
    assert metrics.ends == ["length"]
    assert (metrics.firsts, metrics.drafts) == (1, 4)  # two cycles of two drafts
    assert metrics.gauges[-1] == (0, 0, 2)


def test_another_client_does_not_wait_for_one_with_many_requests():
    fake = FakeEngine(slots=1, gated=True)
    with serving(fake) as engine:
        many, _ = requests(10, tokens=1, client="many")
        engine.submit(many)
        single, heard = request(99, tokens=1, client="single")
        engine.submit([single])
        fake.gate.release(3)
        assert heard.reason == "length"
        assert fake.begun.index(99) <= 2


# Cancellation -------------------------------------------------------------------------------------


def test_a_cancelled_sequence_frees_its_slot_before_the_next_step():
    fake, metrics = FakeEngine(slots=1, gated=True), Counts()
    with serving(fake, metrics=metrics) as engine:
        long, heard = request(0, tokens=1_000_000)
        waiting, heard_waiting = request(1, tokens=1)
        engine.submit([long])
        engine.submit([waiting])
        fake.gate.release()
        assert heard.first.wait(30)
        engine.cancel([long])
        fake.gate.release(2)  # the step in progress, and one of the sequence that waited
        assert heard_waiting.reason == "length"
        assert long.finished
    assert len(heard.tokens) <= 2
    assert sorted(metrics.ends) == ["cancelled", "length"]


def test_what_is_cancelled_while_it_waits_never_begins():
    fake, metrics = FakeEngine(slots=1, gated=True), Counts()
    with serving(fake, metrics=metrics) as engine:
        (first, second), (heard, never) = requests(2, tokens=2)
        engine.submit([first])
        engine.submit([second])
        engine.cancel([second])
        fake.gate.release(10)
        assert heard.reason == "length"
    assert fake.begun == [0]
    assert not never.outputs
    assert sorted(metrics.ends) == ["cancelled", "length"]


def test_cancelling_twice_and_after_the_end_is_harmless():
    metrics = Counts()
    with serving(FakeEngine(), metrics=metrics) as engine:
        ended, heard = request(0)
        engine.submit([ended])
        assert heard.reason == "length"
        engine.cancel([ended])
        running, _ = request(1, tokens=1_000_000)
        engine.submit([running])
        engine.cancel([running])
        engine.cancel([running])
        assert soon(lambda: not (engine.running or engine.waiting))
    assert metrics.ends == ["length", "cancelled"]


# How many are taken -------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_all_of_a_request_is_taken_or_none():
    with serving(FakeEngine(slots=1, gated=True), max_queue=2) as engine:
        sequences, _ = requests(5)
        engine.submit(sequences[:3])  # one slot and two places in the queue
        with pytest.raises(QueueFullError, match="limit of 2") as caught:
            engine.submit(sequences[3:])
        assert 1 <= caught.value.retry_after <= 120
        assert engine.waiting + engine.running == 3


def test_images_that_wait_are_bounded(monkeypatch):
    """Hundreds of megabytes a request, as the target reads them; its choices share them."""

    def with_image(index, pixels):
        sequence, heard = request(index)
        sequence.multimodal_inputs = {"pixel_values": pixels}
        return sequence, heard

    monkeypatch.setattr(async_engine, "_MOST_INPUT_BYTES", 4_000_000)
    shared = torch.zeros(600_000)  # 2.4 MB
    with serving(FakeEngine(slots=1, gated=True)) as engine:
        choices = [with_image(index, shared)[0] for index in range(3)]
        engine.submit(choices)
        told = "take 2 MB as the target reads them, and 4 MB more would be over the limit of 4 MB"
        with pytest.raises(QueueFullError, match=told) as caught:
            engine.submit([with_image(3, torch.zeros(900_000))[0]])
        assert caught.value.retry_after >= 1
        engine.submit([request(4)[0]])  # text
        small, heard = with_image(5, torch.zeros(300_000))
        engine.submit([small])
        engine.engine.gate.release(10_000)
        assert heard.reason == "length"
    with serving(FakeEngine(slots=1)) as engine:
        large, heard = with_image(6, torch.zeros(2_000_000))
        engine.submit([large])  # nothing else holds any
        assert heard.reason == "length"


def test_a_sequence_on_its_way_to_the_engine_counts():
    class Slow(FakeEngine):
        called, go = threading.Event(), threading.Event()

        def add_request(self, sequence):
            self.called.set()
            assert self.go.wait(30)
            return super().add_request(sequence)

    fake = Slow(slots=1)
    with serving(fake, max_queue=0) as engine:
        first, heard = request(0, tokens=1)
        engine.submit([first])
        assert fake.called.wait(30)
        try:
            assert engine.waiting == 1
            with pytest.raises(QueueFullError):
                engine.submit([request(1)[0]])
        finally:
            fake.go.set()
        assert heard.reason == "length"


def test_requests_are_taken_while_the_caches_are_made_anew():
    """An engine has no slots in the midst of a reset."""

    class Resetting(FakeEngine):
        called, go = threading.Event(), threading.Event()

        def reset(self, error):
            lost, slots = super().reset(error), self.max_sequences
            self.max_sequences = 0
            self.called.set()
            assert self.go.wait(30)
            self.max_sequences = slots
            return lost

    def once(engine):
        if engine.steps == 1:
            raise RuntimeError("out of luck")

    fake = Resetting(slots=2, on_step=once)
    with serving(fake, max_queue=0) as engine:
        lost, heard_lost = request(0)
        engine.submit([lost])
        assert fake.called.wait(30)
        try:
            after, heard = request(1)
            engine.submit([after])
            assert engine.slots == 2
        finally:
            fake.go.set()
        assert isinstance(heard_lost.error, DecodingError)
        assert heard.reason == "length"


@pytest.mark.parametrize(("count", "seconds"), [(1, 1), (9, 5), (400, 120)])
def test_retry_after_is_by_how_many_have_to_leave(count, seconds):
    engine = AsyncEngine(FakeEngine(slots=2), max_queue=400, metrics=Counts())  # not started
    engine.submit(requests(402)[0])
    with pytest.raises(QueueFullError, match=f"in about {seconds} seconds") as caught:
        engine.submit(requests(count)[0])
    assert caught.value.retry_after == seconds  # a second each, as nothing is known of them


@pytest.mark.parametrize("tokens", [(40,), (40, 41, 42), (1, 200), (5, 6, 7, 400), range(1, 100)])
@pytest.mark.parametrize("slots", [1, 8])
def test_retry_after_is_when_there_is_room(monkeypatch, slots, tokens):
    """A simulation under load: whenever there is room a request comes, and the next is refused."""
    clock, rng = [0.0], random.Random(0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def tick(engine):
        clock[0] += 1.0

    engine = AsyncEngine(FakeEngine(slots, on_step=tick), max_queue=4, metrics=Counts())

    def step():
        engine._update_requests()
        engine._step()

    told, waited = [], []
    for number in range(20 * slots + 40):
        engine.submit([request(number, tokens=rng.choice(tokens))[0]])
        if number < 5 * slots or engine._unfinished < slots + 4:
            while engine._unfinished == slots + 4:
                step()
            continue
        with pytest.raises(QueueFullError) as caught:
            engine.submit([request(0)[0]])
        told.append(caught.value.retry_after)
        since = clock[0]
        while engine._unfinished == slots + 4:
            step()
        waited.append(clock[0] - since)
    in_time = [actual <= said for actual, said in zip(waited, told, strict=True)]
    assert statistics.fmean(in_time) > 0.4, "a client that waits as told is likely to find room"
    assert statistics.fmean(told) < 1.6 * statistics.fmean(waited), "and does not wait in vain"


def test_a_cancelled_sequence_leaves_its_place_in_the_queue_at_once():
    """Not only when the step in progress has ended."""
    fake = FakeEngine(slots=1, gated=True)
    with serving(fake, max_queue=1) as engine:
        (running, waiting, late), heard = requests(3, tokens=1)
        engine.submit([running])
        engine.submit([waiting])
        with pytest.raises(QueueFullError):
            engine.submit([late])
        engine.cancel([waiting])
        engine.submit([late])  # no step has ended meanwhile
        with pytest.raises(QueueFullError):
            engine.submit([request(9)[0]])
        fake.gate.release(9)
        assert heard[2].reason == "length"
    assert fake.begun == [0, 2]


def test_what_could_never_be_taken_is_refused_for_good():
    engine = AsyncEngine(FakeEngine(slots=2), max_queue=1, metrics=Counts())
    with pytest.raises(InputError, match="4 sequences are requested at once; this server takes 3"):
        engine.submit(requests(4)[0])
    engine.submit(requests(3)[0])
    with pytest.raises(QueueFullError):
        engine.submit(requests(3)[0])


# Draining -----------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_waits_and_takes_nothing_new():
    fake = FakeEngine(slots=1, gated=True)
    with serving(fake) as engine:
        sequences, heard = requests(2, tokens=3)
        for sequence in sequences:
            engine.submit([sequence])
        engine.drain(60)
        assert engine.state == "stopping"
        with pytest.raises(ShuttingDownError, match="going down"):
            engine.submit([request(2)[0]])
        fake.gate.release(20)
        assert [each.reason for each in heard] == ["length", "length"]
        engine.join()
        assert engine.ended


def test_at_the_deadline_what_is_left_ends_with_an_error():
    fake, metrics = FakeEngine(slots=1, gated=True), Counts()
    with serving(fake, metrics=metrics) as engine:
        running, heard = request(0, tokens=1_000_000)
        waiting, heard_waiting = request(1)
        engine.submit([running])
        engine.submit([waiting])
        fake.gate.release(2)
        assert heard.first.wait(30)
        engine.drain(60)
        engine.drain(0)  # the earlier deadline counts
        engine.drain(60)
        fake.gate.release(2)
        for each in (heard, heard_waiting):
            assert isinstance(each.error, ShuttingDownError)
        engine.join()
    assert metrics.ends == ["failed", "failed"]


def test_what_is_submitted_while_it_drains_is_refused_or_heard_of():
    """Whenever the deadline falls: no listener waits for ever, and the thread ends."""
    threads = threading.active_count()
    for number in range(30):
        engine = AsyncEngine(FakeEngine(), max_queue=1000, metrics=Counts())
        engine.start()
        taken = []

        def submit(engine=engine, taken=taken):
            with contextlib.suppress(ShuttingDownError):
                for index in range(100):
                    sequence, heard = request(index)
                    engine.submit([sequence])
                    taken.append(heard)
                    if index % 3 == 0:
                        engine.cancel([sequence])
                        taken.pop()

        submitting = threading.Thread(target=submit)
        submitting.start()
        engine.drain(0.001 * (number % 3))
        submitting.join()
        engine.join()
        assert all(heard.done.wait(30) for heard in taken)
        assert (engine.running, engine.waiting) == (0, 0)
    assert threading.active_count() == threads


# Failures -----------------------------------------------------------------------------------------


def test_a_stop_rule_that_raises_fails_its_own_sequence_only():
    def bad(sequence):
        raise ZeroDivisionError("in a rule")

    with serving(FakeEngine()) as engine:
        good, heard = request(0, tokens=5)
        broken, heard_broken = request(1, tokens=5, rules=[bad])
        engine.submit([good, broken])
        assert isinstance(heard_broken.error, DecodingError)
        assert "ZeroDivisionError" in str(heard_broken.error)
        assert "in a rule" not in str(heard_broken.error), "internals stay inside"
        assert heard.reason == "length"
        assert heard.tokens == [0] * 5


def test_what_the_engine_refuses_fails_with_the_engines_words():
    class Choosy(FakeEngine):
        def add_request(self, sequence):
            if sequence.index == 0:
                raise InputError("the index is 0; expected more.")
            return super().add_request(sequence)

    with serving(Choosy()) as engine:
        sequences, (refused, heard) = requests(2)
        engine.submit(sequences)
        assert str(refused.error) == "the index is 0; expected more."
        assert heard.reason == "length"


def test_a_step_that_raises_loses_what_runs_and_nothing_that_waits():
    def once(engine):
        if engine.steps == 2:
            raise RuntimeError("out of luck")

    fake, metrics = FakeEngine(slots=1, on_step=once), Counts()
    with serving(fake, metrics=metrics) as engine:
        (lost, waiting), (heard_lost, heard) = requests(2, tokens=3)
        engine.submit([lost])
        engine.submit([waiting])
        assert isinstance(heard_lost.error, DecodingError)
        assert heard.reason == "length"
        assert engine.state == "ready"
    assert fake.resets == 1
    assert metrics.ends == ["failed", "length"]


def test_a_sequence_that_ended_in_a_step_that_raised_does_not_wait_for_ever():
    """Its last output is lost with the step."""

    class Late(FakeEngine):
        def step(self):
            outputs = super().step()
            if self.steps == 1:
                raise RuntimeError("out of luck")
            return outputs

    with serving(Late(slots=2)) as engine:
        short, heard_short = request(0, tokens=1)
        long, heard_long = request(1, tokens=9)
        waiting, heard = request(2, tokens=2)
        engine.submit([short, long, waiting])
        assert isinstance(heard_short.error, DecodingError)
        assert isinstance(heard_long.error, DecodingError)
        assert heard.reason == "length"
        assert engine.state == "ready"


def test_a_step_that_fails_before_any_sequence_runs_is_not_tried_for_ever():
    class Full(FakeEngine):
        def step(self):
            raise MemoryError

    fake = Full()
    with serving(fake) as engine:
        sequences, heard = requests(3)
        engine.submit(sequences)
        assert all(isinstance(each.error, DecodingError) for each in heard)
        assert engine.state == "ready"
        assert not len(fake.queue)


def test_an_engine_that_cannot_be_reset_is_the_end_and_says_so():
    class Dead(FakeEngine):
        def step(self):
            raise RuntimeError("dead")

        def reset(self, error):
            raise RuntimeError("still dead")

    with serving(Dead()) as engine:
        sequence, heard = request(0)
        engine.submit([sequence])
        assert isinstance(heard.error, ShuttingDownError)
        engine.join()
        assert engine.state == "failed"
        with pytest.raises(ShuttingDownError, match="cannot decode any more"):
            engine.submit([request(1)[0]])


class Exit(BaseException):
    """Not an error that any code handles."""


@pytest.mark.parametrize("where", ["add_request", "step", "abort"])
def test_whatever_ends_the_thread_every_listener_hears_of_it(where):
    class Fatal(FakeEngine):
        def add_request(self, sequence):
            if where == "add_request" and sequence.index == 1:
                raise Exit
            return super().add_request(sequence)

        def step(self):
            super().step()
            raise Exit

        def abort(self, sequence):
            super().abort(sequence)
            if where == "abort":
                raise ZeroDivisionError

    fake = Fatal(slots=2)
    engine = AsyncEngine(fake, max_queue=9, metrics=Counts())
    engine.start()
    sequences, heard = requests(4, tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        engine.submit(sequences)
        engine.join()
    assert all(isinstance(each.error, ShuttingDownError) for each in heard)
    assert engine.state == "failed"
    assert engine.ended


@pytest.mark.parametrize("failing", ["set_queue", "observe_output", "observe_finished"])
def test_metrics_that_fail_cost_no_request(failing):
    def broken(*_values, **_named):
        raise OSError("no room for numbers")

    metrics = Counts()
    setattr(metrics, failing, broken)
    with serving(FakeEngine(), metrics=metrics) as engine:
        sequences, heard = requests(3, tokens=3)
        for sequence, each in zip(sequences, heard, strict=True):
            engine.submit([sequence])
            assert each.reason == "length"
        assert engine.state == "ready"


class Large:
    """Something that a step had in hand."""


def raising(kept):
    large = Large()
    kept.append(weakref.ref(large))
    try:
        raise KeyError("inside")
    except KeyError as error:
        raise RuntimeError("no room") from error


@pytest.mark.parametrize("where", ["step", "rule", "add_request"])
def test_an_error_that_is_told_holds_nothing_of_what_failed(where):
    """Or caches would be there twice while new ones are made."""
    kept, at_reset = [], []

    class Failing(FakeEngine):
        def add_request(self, sequence):
            if where == "add_request":
                raising(kept)
            return super().add_request(sequence)

        def reset(self, error):
            at_reset.extend(each() for each in kept)
            return super().reset(error)

    def on_step(engine):
        if where == "step":
            raising(kept)

    rules = [lambda sequence: raising(kept)] if where == "rule" else []
    with serving(Failing(on_step=on_step)) as engine:
        sequence, heard = request(0, rules=rules)
        engine.submit([sequence])
        assert isinstance(heard.error.__cause__, RuntimeError)  # the log and a debugger may ask
        assert [each() for each in kept] == [None]
        assert at_reset == ([None] if where == "step" else [])


# Streams ------------------------------------------------------------------------------------------


SEQUENCE = Sequence([1], SamplingParams())
BLOCK = SequenceOutput(SEQUENCE, (1,), 0, 1, None)
END = SequenceOutput(SEQUENCE, (1,), 0, 1, "length")


def in_a_loop(check):
    async def bounded():
        return await asyncio.wait_for(check(), 30)

    return asyncio.run(bounded())


async def rest_of(stream):
    return [output async for outputs in stream for output in outputs]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_stream_ends_with_its_last_sequence():
    async def check():
        stream = OutputStream([SEQUENCE, SEQUENCE], lambda sequences: None)
        for output in (BLOCK, END, BLOCK, END):
            stream.deliver(output)
        assert await rest_of(stream) == [BLOCK, END, BLOCK, END]
        assert await rest_of(stream) == []

    in_a_loop(check)


def test_a_reader_that_waits_hears_of_a_cancellation():
    async def check():
        cancelled = []
        stream = OutputStream([SEQUENCE], cancelled.append)
        reader = asyncio.ensure_future(rest_of(stream))
        stream.deliver(BLOCK)
        await settle()
        stream.cancel()
        stream.cancel()
        assert await reader == [BLOCK]
        assert cancelled == [[SEQUENCE]]  # once

    in_a_loop(check)


def test_outputs_after_a_cancellation_are_dropped():
    async def check():
        stream = OutputStream([SEQUENCE], lambda sequences: None)
        reader = asyncio.ensure_future(rest_of(stream))
        await settle()
        stream.deliver(END)  # on its way when the stream is cancelled
        stream.cancel()
        assert await reader == []
        await settle()
        assert await rest_of(stream) == []

    in_a_loop(check)


def test_an_event_loop_that_was_busy_rests_and_gets_what_came_meanwhile_together(monkeypatch):
    """A delivery that took it 5 ms is followed by 25 ms for the engine."""

    async def check():
        loop, spent, held = asyncio.get_running_loop(), [0.0], []
        monkeypatch.setattr(time, "thread_time", lambda: spent[0])
        monkeypatch.setattr(loop, "call_later", lambda delay, call: held.append((delay, call)))
        stream = OutputStream([SEQUENCE], lambda sequences: None)
        stream.deliver(BLOCK)
        assert await anext(stream) == [BLOCK]
        spent[0] += 0.005
        await settle()
        for _ in range(2):
            stream.deliver(BLOCK)
            await settle()
        [(delay, call)] = held
        assert 0.02 < delay <= 0.025
        call()
        assert await anext(stream) == [BLOCK, BLOCK]
        spent[0] += 0.005
        await settle()
        stream.deliver(BLOCK)
        await settle()
        assert len(held) == 2
        stream.deliver(END)  # the last output waits for nothing
        assert await anext(stream) == [BLOCK, END]

    in_a_loop(check)


def test_outputs_of_several_steps_are_merged_by_sequence():
    first, other = (request(index, tokens=9)[0] for index in range(2))
    score = (TokenScore(-1.0, ()),)
    outputs = [
        SequenceOutput(first, (1, 2), 1, 4, None, score * 2, 3),
        SequenceOutput(other, (7,), 0, 2, None),
        SequenceOutput(first, (3,), 0, 5, "length", score, 3),
    ]
    assert merged(outputs) == [
        SequenceOutput(first, (1, 2, 3), 1, 5, "length", score * 3, 6),
        SequenceOutput(other, (7,), 0, 2, None),
    ]
    failed = SequenceOutput(other, (), 0, 2, None, error=ValueError("gone"))
    assert merged([*outputs[:2], failed]) == [*outputs[:2], failed]


def test_a_loop_that_is_gone_is_no_failure():
    async def check():
        return OutputStream([SEQUENCE], lambda sequences: None)

    in_a_loop(check).deliver(BLOCK)


# Real engines -------------------------------------------------------------------------------------

MOST = 16
PROMPTS = random_prompts([3, 9, 5, 40, 14, 30])


@pytest.fixture(scope="module")
def expected():
    """What plain decoding alone writes; a shorter output is its beginning."""
    return run(make_target("llama"), None, PROMPTS, max_new_tokens=MOST)[0]


def make_engine(**options):
    return Engine(
        make_target("llama"), drafter_of(random_drafter()), slots=3, capacity=64, depth=3,
        chunk=16, reuse=True,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_random_arrivals_cancellations_and_a_failed_step(expected, ahead, monkeypatch):
    """Every sequence that finishes has the tokens it would have alone; no slot is lost."""
    real, rng, steps = make_engine(ahead=ahead), random.Random(0), []
    step = real.runner.start_cycle

    def start(*given):
        steps.append(real.running)
        if len(steps) == 12:
            raise RuntimeError("out of luck")
        return step(*given)

    monkeypatch.setattr(real.runner, "start_cycle", start)
    metrics, submitted = Counts(), []
    with serving(real, max_queue=1000, metrics=metrics) as engine:
        for number in range(32):
            own = rng.randrange(len(PROMPTS))
            sequence, heard = request(
                number, tokens=rng.randint(1, MOST), prompt=PROMPTS[own],
                client=str(number % 3), speculate=rng.random() < 0.7,
            )  # fmt: skip
            engine.submit([sequence])
            submitted.append((own, sequence, heard, rng.random() < 0.2))
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
            if submitted[-1][-1]:
                engine.cancel([sequence])
        for own, sequence, heard, cancelled in submitted:
            if cancelled:
                continue
            assert heard.done.wait(60)
            if heard.error is None:
                assert heard.tokens == expected[own][: sequence.params.max_new_tokens]
                assert heard.tokens == sequence.output
        assert soon(lambda: not (engine.running or engine.waiting))
        assert engine.state == "ready"
    assert metrics.ends.count("failed") == steps[11]
    assert metrics.ends.count("length") > 15
    assert len(metrics.ends) == 32
    assert sorted(real.scheduler.blocks.free) == [0, 1, 2]


def test_the_reference_loop_serves_one_sequence_at_a_time(expected):
    """A failure in it is the sequence's own, and the next one begins anew."""

    def bad(sequence):
        raise ZeroDivisionError

    decoder = tiny_decoder(engine="reference")
    real = ReferenceEngine(decoder.target, decoder.drafter)
    with serving(real) as engine:
        broken, heard_broken = request(0, rules=[bad], prompt=PROMPTS[0])
        gone, heard_gone = request(1, tokens=50, prompt=PROMPTS[1])
        others = [
            request(2 + place, tokens=6, prompt=PROMPTS[place], speculate=bool(place % 2))
            for place in range(4)
        ]
        engine.submit([broken, gone, *(sequence for sequence, _ in others)])
        assert heard_gone.first.wait(30)
        engine.cancel([gone])
        assert isinstance(heard_broken.error, DecodingError)
        for place, (_, heard) in enumerate(others):
            assert heard.reason == "length"
            assert heard.tokens == expected[place][:6]
