"""`python -m domino_spec` is `domino`."""

import subprocess
import sys

from domino_spec import __version__


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "domino_spec", *words], capture_output=True, text=True, check=False
    )


def test_the_package_runs_as_the_command_line():
    assert run_module("--version").stdout == f"domino-spec {__version__}\n"


def test_its_exit_code_is_the_commands():
    refused = run_module("doctor")
    assert refused.returncode == 2
    assert "TARGET" in refused.stderr
