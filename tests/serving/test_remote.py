"""The engine in another process than HTTP: what passes over, and what ends with what."""

import asyncio
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from domino_spec.decoding import SamplingParams
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import DecodingError, ShuttingDownError
from tests.serving.fakes import FakeEngine
from tests.serving.live import live, tiny_decoder
from tests.serving.remote import connected
from tests.serving.test_server import BODY, told
from tests.support.forked import ask

CHAT = {"messages": [{"role": "user", "content": "the fox"}], "temperature": 0, "max_tokens": 24}
TEXT = {"prompt": "the fox", "temperature": 0, "max_tokens": 12}
BODIES = [
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["e", "o"]}),
    ("chat/completions", {**CHAT, "n": 3, "temperature": 0.9, "seed": 5, "logit_bias": {"9": 4}}),
    ("chat/completions", {**CHAT, "stream": True, "domino": {"blocks": True}}),
    ("chat/completions", {**CHAT, "max_tokens": 9999}),
    ("completions", {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ("completions", {**TEXT, "structured_outputs": {"regex": "(the|dog)( lazy)?"}}),
    ("completions", {**TEXT, "structured_outputs": {"regex": "("}}),
]


@pytest.fixture(scope="module")
def servers():
    settings = {"slots": 4, "page": False}
    with live(**settings) as local, live(remote=True, **settings) as remote:
        yield local.address, remote.address


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_responses_are_those_of_one_process(servers, path, body):
    found = [httpx.post(f"{each}/v1/{path}", json={"model": "tiny", **body}) for each in servers]
    local, remote = ([without_names(line) for line in each.text.split("\n\n")] for each in found)
    assert found[0].status_code == found[1].status_code
    assert remote == local


def without_names(line):
    """Without what differs between any two responses."""
    if not line.removeprefix("data: ").startswith("{"):
        return line
    found = json.loads(line.removeprefix("data: "))
    return {name: value for name, value in found.items() if name not in ("id", "created")}


@asynccontextmanager
async def serving(engine):
    """A service whose engine is a fake at the other end of a pipe."""
    config = ServerConfig(model="m", context=128)
    with connected(tiny_decoder(drafter=False), config, engine=engine) as (service, host):
        service.engine.start()
        try:
            yield service, host
        finally:
            engine.gate.release(10_000)


def sequences(service, count, tokens=4):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return [service.sequence([1, 2, 3], params, index=index) for index in range(count)]


async def read(stream):
    return [output async for outputs in stream for output in outputs]


async def soon(true):
    for _ in range(2000):
        if true():
            return True
        await asyncio.sleep(0.005)
    return False


def test_tokens_come_in_order_and_are_counted():
    async def check():
        async with serving(FakeEngine(slots=3)) as (service, host):
            found = await read(service.submit(sequences(service, 5, tokens=20), client="me"))
            for index in range(5):
                own = [output for output in found if output.sequence.index == index]
                assert [output.tokens for output in own] == [(index,)] * 20
                assert [output.cycle for output in own] == list(range(20))
                assert own[-1].finish_reason == "length"
            assert 'domino_tokens_total{kind="own"} 100.0' in metrics_of(service)
            assert not host._sequences
            assert not host._keys

    asyncio.run(check())


def metrics_of(service) -> str:
    return service.engine._metrics.render().decode()


def test_a_cancellation_passes_over_and_frees_the_slot():
    async def check():
        fake = FakeEngine(slots=1, gated=True)
        async with serving(fake) as (service, host):
            long = service.submit(sequences(service, 1, tokens=100), client="me")
            fake.gate.release(2)
            async with long:
                await anext(long)
            assert service.engine.waiting == 0
            assert await soon(lambda: host.engine._cancelled)
            fake.gate.release(50)
            found = await read(service.submit(sequences(service, 1), client="me"))
            assert found[-1].finish_reason == "length"
            assert await soon(lambda: not host.engine.running)
            assert 'ended_total{reason="cancelled"} 1.0' in metrics_of(service)

    asyncio.run(check())


def test_a_step_that_fails_is_told_and_a_lost_engine_too():
    def fail(engine):
        if engine.steps == 2:
            raise RuntimeError("out of dominoes")

    async def check():
        fake = FakeEngine(on_step=fail)
        async with serving(fake) as (service, _):
            (*_, last) = await read(service.submit(sequences(service, 1), client="me"))
            assert isinstance(last.error, DecodingError)
            assert service.engine.state == "ready"
            fake.steps, fake.reset = 1, lambda error: 1 / 0
            await read(service.submit(sequences(service, 1), client="me"))
            assert await soon(lambda: service.engine.state == "failed")
            with pytest.raises(ShuttingDownError, match="caches could not be made anew"):
                service.submit(sequences(service, 1), client="me")

    asyncio.run(check())


def test_each_side_ends_when_the_other_is_gone():
    async def check():
        fake = FakeEngine(gated=True)
        async with serving(fake) as (service, host):
            lost = asyncio.Event()
            service.engine.on_lost = lost.set
            stream = service.submit(sequences(service, 2), client="me")
            assert await soon(lambda: len(host._sequences) == 2)
            shut(host._connection)  # as the end of a process does
            found = await read(stream)
            assert [type(output.error) for output in found] == [ShuttingDownError] * 2
            assert "the process of its engine ended" in str(found[0].error)
            await lost.wait()
            assert (service.engine.state, service.engine.ended) == ("failed", True)
            fake.gate.release(100)
            assert await soon(lambda: host.engine.ended), "the engine has no client any more"

    asyncio.run(check())


def shut(connection):
    """End both directions, though a thread reads from it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


# Two real processes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked at in /proc")
def test_neither_process_outlives_the_other(tmp_path):
    """A server that loses its HTTP, and after it one that loses its engine."""
    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(ask, "tests.serving.process", "serve_split", str(tmp_path))
        pid = int(told(tmp_path / "pid"))
        try:
            address = told(tmp_path / "0")
            (front,) = fronts(pid)
            with stream_of(address) as lines:
                next(lines)
                os.kill(front, signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    list(lines)
            address = told(tmp_path / "1")
            assert told(tmp_path / "code") == "1"
            assert not alive(front)
            (front,) = fronts(pid)
            with stream_of(address) as lines:
                next(lines)
                os.kill(pid, signal.SIGKILL)
                *_, error, last = filter(None, lines)
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # or the thread would wait for it
            raise
        with suppress(Exception):
            serving.result(60)
    assert "the process of its engine ended" in error
    assert last == "data: [DONE]"
    assert gone(front)


@contextmanager
def stream_of(address):
    """Lines of a streamed chat that have something to say."""
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=BODY, timeout=60) as answer:
        assert answer.status_code == 200
        yield (line for line in answer.iter_lines())


def fronts(pid):
    """Processes of HTTP that this one has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(each) for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def alive(pid):
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def gone(pid):
    """Whether it ends in time."""
    return any(not alive(pid) or time.sleep(0.01) for _ in range(3000))
