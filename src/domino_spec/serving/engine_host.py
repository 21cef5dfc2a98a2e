"""The engine's side of a server of two processes: this one decodes, a child speaks HTTP."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams, SequenceOutput
from domino_spec.decoding import Sequence as Decoded
from domino_spec.serving.async_engine import AsyncEngine, StepEngine
from domino_spec.serving.engine_client import public_error
from domino_spec.serving.engine_setup import SequenceMaker
from domino_spec.serving.errors import DecodingError
from domino_spec.serving.grammars import GrammarService
from domino_spec.serving.service import RuleMaker

_log = logging.getLogger("domino_spec.serving")


class EngineHost:
    """Decodes what the other process sends, and tells it of each step in one message.

    It hears of outputs as an engine's metrics do, which end each step.
    """

    def __init__(
        self,
        engine: StepEngine,
        decoder: DominoDecoder,
        connection: Connection,
        log: Callable[[str], None],
    ) -> None:
        # What is taken the other process decides.
        self.engine = AsyncEngine(engine, max_queue=sys.maxsize, metrics=self)
        self._make = SequenceMaker(decoder.tokenizer)
        self._compiler = decoder.grammars
        self._grammars = GrammarService(decoder.grammars)
        self._decoder = decoder
        self._connection = connection
        self._sending = threading.Lock()
        self._log = log
        self._slow = ThreadPoolExecutor(1, "domino-slow-requests")
        self._sequences: dict[int, Decoded] = {}
        self._keys: dict[Decoded, int] = {}
        self._outputs: list[tuple[Any, ...]] = []
        self._told: tuple[Any, ...] = ()
        """What the last message said of the engine."""

    def start(self) -> None:
        """Decode and listen, in threads."""
        self.engine.start()
        for target in (self._listen, self._await_end):
            threading.Thread(target=target, name=f"domino{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Have the other process drain; the second time, end at once."""
        self._send("stop")

    def close(self) -> None:
        """End what is left."""
        self.engine.drain(0)
        self.engine.join()
        self._grammars.close()
        self._slow.shutdown(cancel_futures=True)

    # As metrics of the engine, in its thread --------------------------------------------------

    def observe_output(self, output: SequenceOutput, /, *, now: float) -> None:  # noqa: ARG002
        """Keep what a step committed until the step has ended."""
        sequence = output.sequence
        more = None
        if output.scores or output.tree is not None or not output.cycle or output.finish_reason:
            names = ["finish_reason", "cycles"]
            names += ["admitted", "cached", "prompt_scores"] * (not output.cycle)
            names += ["stats"] * (output.finish_reason is not None)
            own = {name: getattr(sequence, name) for name in names}
            more = (output.scores, output.tree, own)
        key, reason = self._keys[sequence], output.finish_reason
        told = (output.tokens, output.accepted, output.cycle, reason, output.drafts, more)
        self._outputs.append((key, *told))

    def observe_finished(self, sequence: Decoded, reason: str, /) -> None:
        """It is not known any more; why it failed is told."""
        if (key := self._forget(sequence)) is not None and reason == "failed":
            self._outputs.append((key, _portable(sequence.error)))

    def set_queue(self, *, waiting: int, running: int, slots: int) -> None:  # noqa: ARG002
        """A step has ended: all of it in one message."""
        state = (running, slots, self.engine.failure)
        if self._outputs or state != self._told:
            self._told = state
            outputs, self._outputs = self._outputs, []
            self._send("step", time.perf_counter(), *state, outputs)

    def _forget(self, sequence: Decoded) -> int | None:
        key = self._keys.pop(sequence, None)
        if key is not None:
            self._sequences.pop(key, None)
        return key

    # In its own threads -----------------------------------------------------------------------

    def _await_end(self) -> None:
        self.engine.join()
        self._send("ended")

    def _listen(self) -> None:
        kinds: dict[str, Callable[..., None]] = {
            "add": self._on_add,
            "cancel": self._on_cancel,
            "drain": self.engine.drain,
            "ask": self._on_ask,
            "log": self._log,
        }
        try:
            while True:
                for kind, *told in pickle.loads(self._connection.recv_bytes()):
                    kinds[kind](*told)
        except (EOFError, OSError):
            pass
        finally:  # the other process is gone, and all of its clients with it
            self.engine.drain(0)

    def _on_add(self, requests: Sequence[tuple[Any, ...]]) -> None:
        added = []
        for key, *given in requests:
            try:
                sequence = self._sequence(*given)
            except Exception as error:
                _log.exception("a sequence could not be made")
                self._refuse([key], error)
                continue
            self._sequences[key], self._keys[sequence] = sequence, key
            added.append(sequence)
        try:
            self.engine.submit(added)
        except Exception as error:
            keys = [self._forget(sequence) for sequence in added]
            self._refuse([key for key in keys if key is not None], error)

    def _sequence(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        eos: frozenset[int],
        kept: Mapping[int, str] | None,
        rules: Sequence[RuleMaker],
        options: dict[str, Any],
    ) -> Decoded:
        if params.grammar is not None:
            options["matcher"] = self._compiler.compile(params.grammar).matcher()
        return self._make(prompt, params, eos=eos, kept=kept, rules=rules, **options)

    def _refuse(self, keys: Sequence[int], error: Exception) -> None:
        running, slots, failure = self.engine.running, self.engine.slots, self.engine.failure
        told = [(key, _portable(public_error(error))) for key in keys]
        self._send("step", time.perf_counter(), running, slots, failure, told)

    def _on_cancel(self, keys: Sequence[int]) -> None:
        found = [self._sequences.get(key) for key in keys]
        self.engine.cancel([sequence for sequence in found if sequence is not None])

    def _on_ask(self, number: int, what: str, *given: Any) -> None:
        try:
            if what == "compile":
                asked: Future[Any] = self._grammars.start(*given)
            else:
                asked = self._slow.submit(lambda: self._decoder.processor)
        except Exception as error:
            self._send("answer", number, None, _portable(error))
            return
        asked.add_done_callback(partial(self._answer, number, what))

    def _answer(self, number: int, what: str, done: Future[Any]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        found = done.result() if error is None and what != "compile" else None
        self._send("answer", number, found, None if error is None else _portable(error))

    def _send(self, *message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:  # the other process is gone, as its listener tells
            pass


def _portable(error: BaseException | None) -> Exception:
    """The error if it can be sent, else what it says."""
    try:
        found = pickle.loads(pickle.dumps(error))
        assert isinstance(found, Exception)
    except Exception:
        return DecodingError(str(error))
    return found
