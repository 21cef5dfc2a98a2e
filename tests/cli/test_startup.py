"""What a command imports before it has something to compute: neither PyTorch nor Transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
from domino_spec.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
heavy = {"torch", "transformers"} & set(sys.modules)
if heavy:
    sys.exit(f"imported {heavy}")
sys.exit(code)
"""


def light(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own; exit code "imported ..." if it was heavy."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "imported {" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_and_version(arguments):
    assert light(*arguments).returncode == 0


def test_info(draft):
    done = light("info", draft)
    assert done.returncode == 0, done.stderr
    assert "Domino (backbone and causal head)" in done.stdout


def test_info_of_a_packed_drafter():
    done = light("info", "released:smollm2-135m-instruct", "--json")
    assert done.returncode == 0, done.stderr
    assert '"layout": "packed"' in done.stdout
