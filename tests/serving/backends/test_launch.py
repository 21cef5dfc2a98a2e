"""A launch as a child process: keys, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from domino_spec.errors import InputError
from domino_spec.serving.backends.launch import Launch, run
from tests.serving.backends import fake_engine

KEY = "sesame-open-1"
# Drafts are planned before a launch; without them it needs no torch, which takes seconds to import.
_RUN = """\
import sys
from unittest.mock import MagicMock
sys.modules["domino_spec.serving.backends.drafts"] = MagicMock()
from domino_spec.serving.backends.launch import Launch, run
sys.exit(run(Launch(argv=({command!r},), secret_config={secret!r}, prints={prints!r})))
"""


@pytest.fixture
def engine(tmp_path):
    return str(fake_engine.make(tmp_path / "env") / "vllm")


def start(engine: str, *, key: str | None = None) -> subprocess.Popen:
    code = _RUN.format(
        command=engine,
        secret={} if key is None else {"api-key": key},
        prints=() if key is None else (key,),
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def started(folder: Path, process: subprocess.Popen) -> dict:
    """Wait for the server, not for a time."""
    while not (folder / "given.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return fake_engine.given(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_server_and_its_exit_code_comes_back(engine, tmp_path, number):
    process = start(engine)
    given = started(tmp_path / "env", process)
    assert given["group"], "else a terminal's Ctrl-C would reach it twice"
    process.send_signal(number)
    assert process.wait() == 40 + number
    assert (tmp_path / "env" / "ended").read_text() == str(int(number))


def test_a_key_is_in_a_private_file_that_goes_and_never_in_the_log(engine, tmp_path):
    process = start(engine, key=KEY)
    given = started(tmp_path / "env", process)
    told, mode, path = given["private"]
    assert json.loads(told) == {"api-key": KEY}
    assert mode == "0o600"
    assert oct(Path(path).parent.stat().st_mode & 0o777) == "0o700"
    assert KEY not in " ".join(given["argv"])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert 'given {"api-key": "***"}' in err
    assert KEY not in out + err
    assert not Path(path).exists()


@pytest.mark.parametrize(("ends", "code"), [("7", 7), ("0", 0), ("killed", 128 + 9)])
def test_exit_codes(engine, monkeypatch, ends, code):
    monkeypatch.setenv("FAKE_EXIT", ends)
    before = signal.getsignal(signal.SIGTERM)
    assert run(Launch(argv=(engine,))) == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_environment_is_ours_and_the_launchs(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_EXIT", "0")
    launch = Launch(argv=(engine, "--a"), env={"ONE": "1"}, secret_env={"VLLM_API_KEY": KEY})
    assert run(launch) == 0
    given = fake_engine.given(tmp_path / "env")
    assert given["argv"] == ["--a"]
    assert {name: given["env"][name] for name in ("ONE", "VLLM_API_KEY", "FAKE_EXIT")} == {
        "ONE": "1", "VLLM_API_KEY": KEY, "FAKE_EXIT": "0",
    }  # fmt: skip
    assert "VLLM_API_KEY" not in os.environ


def test_what_cannot_be_started_is_one_line(tmp_path):
    with pytest.raises(InputError, match="gone cannot be started"):
        run(Launch(argv=(str(tmp_path / "gone"),)))


def test_what_is_shown_can_be_typed_and_hides_secrets():
    launch = Launch(
        argv=("vllm", "serve", "a b", "--api-key", KEY, KEY, "--port", "1", f"--hf-token={KEY}",
              "--num-draft-tokens", "3"),
        env={"A": "b c"},
        secret_env={"VLLM_API_KEY": KEY},
        secret_config={"api-key": KEY},
    )  # fmt: skip
    assert launch.shown() == (
        "A='b c' VLLM_API_KEY=*** vllm serve 'a b' --api-key *** *** --port 1 --hf-token=*** "
        "--num-draft-tokens 3 --config ***"
    )
    assert KEY not in repr(Launch(argv=("x",), secret_env={"K": KEY}, prints=(KEY,)))
