"""The engine of another process, as the process of HTTP sees it."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

from domino_spec.decoding import SamplingParams, SequenceOutput
from domino_spec.decoding import Sequence as Decoded
from domino_spec.grammars import Grammar, Matcher
from domino_spec.serving.engine_client import EngineClient, EngineMetrics
from domino_spec.serving.errors import ShuttingDownError
from domino_spec.serving.service import RuleMaker

_keys = itertools.count()


class RemoteSequence(Decoded):
    """A sequence that another process decodes; here it has what responses tell of it."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        kept: Mapping[int, str] | None,
        rules: Sequence[RuleMaker],
        **options: Any,
    ) -> None:
        super().__init__(prompt, params, **options)
        self.key = next(_keys)
        """By which both processes know it."""
        self._given = (self.prompt, params, options.get("eos", ()), kept, rules)

    def request(self) -> tuple[Any, ...]:
        """What the engine's process makes its own sequence of."""
        options = {
            "index": self.index,
            "seed": self.seed,
            "client": self.client,
            "speculate": self.speculate,
            "reuse": self.reuse,
        }
        if self.multimodal_inputs:
            options["multimodal_inputs"] = self.multimodal_inputs
        return (self.key, *self._given, options)


class RemoteGrammar:
    """A grammar that the engine's process has compiled."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    def matcher(self) -> Matcher:
        """Stands for the matcher that the engine's process makes."""
        return cast("Matcher", self)


class RemoteEngine(EngineClient):
    """Sends requests to the engine's process, a message for all of a moment; hears of its steps.

    Which requests are taken is decided here, without asking.
    """

    # No engine shares the interpreter: half of the time is left to new requests.
    _rest = 1.0

    def __init__(
        self,
        connection: Connection,
        *,
        slots: int,
        max_queue: int,
        metrics: EngineMetrics,
    ) -> None:
        super().__init__(slots=slots, max_queue=max_queue, metrics=metrics)
        self.on_stop: Callable[[], None] = lambda: None
        """The engine's process was told to stop."""
        self.on_lost: Callable[[], None] = lambda: None
        """The engine's process is gone."""
        self._connection = connection
        self._running = 0
        self._by_key: dict[int, Decoded] = {}
        self._outgoing: list[tuple[Any, ...]] = []
        self._flushing = False
        self._asked: dict[int, Future[Any]] = {}
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._listen, name="domino-steps", daemon=True)

    # For any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Listen to the engine's process, in the event loop that calls it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the engine has come to an end."""
        return self._ended.is_set()

    @property
    def running(self) -> int:
        """Sequences in slots, after the last step."""
        return self._running

    def _take(self, sequences: Sequence[Decoded]) -> None:
        added = [each for each in sequences if isinstance(each, RemoteSequence)]
        self._held |= {id(each): each for each in added}
        self._by_key |= {each.key: each for each in added}
        self._send("add", [each.request() for each in added])

    def cancel(self, sequences: Iterable[Decoded]) -> None:
        """Take these out between two steps; harmless for what has ended."""
        left = [each for each in sequences if isinstance(each, RemoteSequence)]
        left = [each for each in left if self._release(each)]
        if not left:
            return
        for each in left:
            self._observe_finished(each, "cancelled")
        self._send("cancel", [each.key for each in left])

    def drain(self, seconds: float) -> None:
        """Take nothing new; what is not done by then ends with an error."""
        super().drain(seconds)
        self._send("drain", seconds)

    def join(self) -> None:
        """Wait until the engine has ended; `drain` first."""
        self._ended.wait()

    def log(self, line: str) -> None:
        """Have the engine's process write a line."""
        self._send("log", line)

    async def compile(self, grammar: Grammar) -> RemoteGrammar:
        """Have it compiled there, once for all sequences."""
        await asyncio.wrap_future(self._ask("compile", grammar))
        return RemoteGrammar(grammar)

    def load_processor(self) -> Any:
        """The target's processor of images; waits."""
        return self._ask("processor").result()

    def close(self) -> None:
        """Nothing here is to be ended."""

    def _ask(self, what: str, *given: Any) -> Future[Any]:
        found: Future[Any] = Future()
        number = next(_keys)
        with self._changed:
            if self._ended.is_set():
                raise self._gone()
            self._asked[number] = found
        self._send("ask", number, what, *given)
        return found

    def _send(self, *message: Any) -> None:
        """With all else that is to be sent in this pass of the event loop."""
        with self._changed:
            self._outgoing.append(message)
            if self._flushing or self._loop is None:
                return
            self._flushing = True
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:  # the loop is closed
            self._flush()

    def _flush(self) -> None:
        with self._changed:
            messages, self._outgoing, self._flushing = self._outgoing, [], False
        with suppress(OSError):  # the other process is gone, as its listener tells
            self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))

    # In its own thread ------------------------------------------------------------------------

    def _listen(self) -> None:
        kinds: dict[str, Callable[..., None]] = {
            "step": self._on_step,
            "answer": self._on_answer,
            "stop": lambda: self._call(self.on_stop),
            "ended": self._ended.set,
        }
        try:
            while True:
                kind, *told = pickle.loads(self._connection.recv_bytes())
                kinds[kind](*told)
        except (EOFError, OSError):
            pass
        finally:
            self._lose()

    def _on_step(
        self,
        now: float,
        running: int,
        slots: int,
        failure: str | None,
        outputs: list[tuple[Any, ...]],
    ) -> None:
        self._running, self.slots = running, slots
        if failure is not None:
            self._set_failure(failure)
        for key, *told in outputs:
            if (sequence := self._by_key.get(key)) is None:
                continue  # it was cancelled meanwhile
            if len(told) == 1:
                self._fail(sequence, told[0])
                continue
            tokens, accepted, cycle, reason, drafts, more = told
            scores = tree = None
            if more is not None:
                scores, tree, attributes = more
                vars(sequence).update(attributes)
            output = SequenceOutput(
                sequence, tokens, accepted, cycle, reason, scores, drafts, None, tree
            )
            self._deliver(output, now)
        self._update_gauges()

    def _release(self, sequence: Decoded) -> bool:
        if isinstance(sequence, RemoteSequence):
            self._by_key.pop(sequence.key, None)
        return super()._release(sequence)

    def _on_answer(self, number: int, found: Any, error: Exception | None) -> None:
        asked = self._asked.pop(number)
        if not asked.set_running_or_notify_cancel():
            return
        if error is not None:
            asked.set_exception(error)
        else:
            asked.set_result(found)

    def _lose(self) -> None:
        """The other process has closed its end: nothing that it was given will be completed."""
        with self._changed:
            if not self._ended.is_set():
                self._failure = self._failure or "the process of its engine ended"
            self._ended.set()
            asked, self._asked = list(self._asked.values()), {}
        for each in asked:
            if each.set_running_or_notify_cancel():
                each.set_exception(self._gone())
        for sequence in list(self._held.values()):
            self._fail(sequence, self._gone())
        self._running = 0
        self._update_gauges()
        self._call(self.on_lost)

    def _gone(self) -> ShuttingDownError:
        reason = self._failure or "it is going down"
        return ShuttingDownError(f"the server cannot decode any more: {reason}.")

    def _call(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what)
