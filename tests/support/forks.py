"""Jobs in processes of their own, forked from one that has imported what takes seconds.

A module that calls `serve` reads a job (JSON) a line, does each in a fork of itself and answers
with its result and all that it said; `Forks` is the other end, in a test's process.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_SECONDS = 600
"""What a job may take."""


class Forks:
    """The other end of a module that serves jobs; it starts with the first one."""

    def __init__(self, module: str, *, without: Sequence[str] = ()) -> None:
        """`without` some variables of the environment."""
        self._module, self._without = module, without
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its result with its `log`, which is the error's text if it fails."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **{k: v for k, v in os.environ.items() if k not in self._without},
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if answer["result"] is None:
            raise AssertionError(f"the job failed:\n{answer['log'][-8000:]}")
        return answer["result"] | {"log": answer["log"]}


def serve(work: Callable[[dict[str, Any]], dict[str, Any]], *, imported: Sequence[str]) -> None:
    """Do every job on standard input, one after the other, with these modules imported."""
    for name in imported:
        importlib.import_module(name)
    gc.freeze()  # or each fork's collections walk over, and copy, all that was imported
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            log, result = Path(folder, "log"), Path(folder, "result")
            child = os.fork()
            if child == 0:
                _work(work, json.loads(line), log, result)
            os.waitpid(child, 0)
            answer = {
                "log": log.read_text(errors="replace"),
                "result": json.loads(result.read_text()) if result.exists() else None,
            }
        print(json.dumps(answer), flush=True)


def _work(
    work: Callable[[dict[str, Any]], dict[str, Any]], job: dict[str, Any], log: Path, result: Path
) -> None:
    """In the fork, which ends here."""
    signal.alarm(_SECONDS)
    os.environ.update(job.get("environment") or {})
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
        try:
            made = json.dumps(work(job))
            result.write_text(made)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
