"""A sandbox that compiles grammars first: a process of its own with limits on time and memory.

No limit of the compiler's bounds its time: a JSON schema of forty characters takes it minutes. And
it calls itself as deep as a grammar is nested, to the end of the stack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError
from domino_spec.grammars.grammar import Grammar
from domino_spec.grammars.matcher import Vocabulary, compile_prototype, make_tokenizer

COMPILE_TIMEOUT = 3.0
"""Seconds; a grammar that takes longer is refused, and those in use take some milliseconds."""
_START_TIMEOUT = 120.0
_MEMORY_LIMIT = 4 << 30


class GrammarSandbox:
    """The process, started at the first grammar and again after one that it had to be ended for.

    It ends by itself when its input does, with this process at the latest.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: Grammar) -> None:
        """Wait until the grammar was compiled there; an error if it cannot be, or not in time."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it died of something else than this grammar
            process = self._process or self._start()
            given = {"kind": grammar.kind, "text": grammar.text, "lenient": grammar.lenient}
            response = _request(process, given, timeout=COMPILE_TIMEOUT)
            if response is None:
                self._end()
                raise InputError(
                    f"the {grammar.name} takes longer than {COMPILE_TIMEOUT:g} s to compile, or "
                    "more memory or nesting than there is. Simplify it."
                )
            if response["error"] is not None:
                raise InputError(response["error"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        vocabulary = self._vocabulary()
        found = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (found, os.environ.get("PYTHONPATH"))))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "domino_spec.grammars.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which then ends it
        )
        given = {**vars(vocabulary)}
        response = _request(process, given, timeout=_START_TIMEOUT)
        if response is None or response["error"] is not None:
            self._end()
            reason = "its process ended" if response is None else response["error"]
            raise InputError(f"grammars cannot be compiled here: {reason}.")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _request(
    process: subprocess.Popen[str], given: Any, *, timeout: float
) -> dict[str, Any] | None:
    """The response to a line; None where it did not come in time, and the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(timeout, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    response: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
    return response


def _serve() -> None:
    """Lines of the input are a vocabulary, then grammars; each gets a line in response."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):  # not every system has it
        pass
    tokenizer: Any = None
    for line in sys.stdin:
        given, error = json.loads(line), None
        try:
            if tokenizer is None:
                given["ends"] = tuple(given["ends"])
                tokenizer = make_tokenizer(Vocabulary(**given))
            else:
                compile_prototype(tokenizer, Grammar(**given))
        except InputError as wrong:
            error = str(wrong)
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
