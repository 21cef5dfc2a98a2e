"""An environment with an engine that is none: scripts that answer as its Python and its command."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

_REAL = sys.executable

# What a launched server does: writes what it was given, says that it runs, ends as it is told.
_SERVER = """\
import json, os, pathlib, signal, sys, time
place = pathlib.Path({place!r})
given = {{"argv": sys.argv[1:], "env": dict(os.environ), "group": os.getpgrp() == os.getpid()}}
if "--config" in sys.argv:
    private = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
    given["private"] = [private.read_text(), oct(private.stat().st_mode & 0o777), str(private)]
    print("given", private.read_text(), flush=True)
if os.environ.get("FAKE_EXIT"):
    signals = []
else:
    signals = [signal.SIGTERM, signal.SIGINT]
def end(number, frame):
    (place / "ended").write_text(str(number))
    sys.exit(40 + number)
for number in signals:
    signal.signal(number, end)
(place / "given.tmp").write_text(json.dumps(given))
(place / "given.tmp").rename(place / "given.json")
if os.environ.get("FAKE_EXIT") == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("FAKE_EXIT"):
    sys.exit(int(os.environ["FAKE_EXIT"]))
while True:
    time.sleep(0.05)
"""
_PYTHON = """\
import json, sys, runpy
if sys.argv[1] == "-c":
    print({answer!r})
else:
    sys.argv = [sys.argv[2], *sys.argv[3:]]
    runpy.run_path({server!r}, run_name="__main__")
"""


def make(
    folder: Path,
    *,
    command: str = "vllm",
    distribution: str | None = "vllm",
    version: str = "0.32.0",
    plugin: bool = True,
) -> Path:
    """Write the environment and return its `bin`."""
    place = folder / "bin"
    place.mkdir(parents=True)
    server = folder / "server.py"
    server.write_text(_SERVER.format(place=str(folder)))
    found = None if distribution is None else [distribution, version]
    answer = json.dumps({"found": found, "plugins": ["domino"] if plugin else ["other"]})
    inside = folder / "inside.py"
    inside.write_text(_PYTHON.format(answer=answer, server=str(server)))
    _script(place / "python", inside)
    _script(place / command, server)
    return place


def given(folder: Path) -> dict:
    """What the server was run with."""
    return json.loads((folder / "given.json").read_text())


def _script(path: Path, runs: Path) -> None:
    path.write_text(f'#!/bin/sh\nexec "{_REAL}" "{runs}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
