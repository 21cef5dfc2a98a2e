"""Tries grammars out in a process of its own, which a hostile one can only slow down or crash.

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

TRIAL_SECONDS = 3.0
"""A grammar that takes longer is refused; those in use take some milliseconds."""
_START_SECONDS = 120.0
_MOST_MEMORY = 4 << 30


class Trials:
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
            answer = _ask(process, given, seconds=TRIAL_SECONDS)
            if answer is None:
                self._end()
                raise InputError(
                    f"the {grammar.name} takes longer than {TRIAL_SECONDS:g} s to compile, or more "
                    "memory or nesting than there is. Simplify it."
                )
            if answer["error"] is not None:
                raise InputError(answer["error"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        vocabulary = self._vocabulary()
        found = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (found, os.environ.get("PYTHONPATH"))))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "domino_spec.grammars.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which then ends it
        )
        given = {**vars(vocabulary)}
        answer = _ask(process, given, seconds=_START_SECONDS)
        if answer is None or answer["error"] is not None:
            self._end()
            reason = "its process ended" if answer is None else answer["error"]
            raise InputError(f"grammars cannot be compiled here: {reason}.")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _ask(process: subprocess.Popen[str], given: Any, *, seconds: float) -> dict[str, Any] | None:
    """The process's answer to a line; None where it did not come in time, and the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
    return answer


def _serve() -> None:
    """Lines of the input are a vocabulary, then grammars; each is answered by a line."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
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
