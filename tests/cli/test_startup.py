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


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["bench", "run", "--help"], ["adapt", "--help"]]
)
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


NO_TARGET = "error: no model at ./nope: there is no such folder or file. Check the path."
NO_DRAFTER = "error: ./nope is no file or folder here, and not a hub id of the form org/name."
NO_FILE = "error: there is no nope.jsonl; expected a file, a folder, a glob, or hf:name"
REFUSED = [
    ("generate ./nope hello", NO_TARGET),
    ("generate nope hello", "error: no model at nope: it is neither a local folder or GGUF file"),
    ("generate nope.gguf hello", "error: there is no GGUF file at nope.gguf"),
    ("generate {target} hello --draft ./nope", NO_DRAFTER),
    ("generate {target} --prompt-file nope.txt", "error: the prompt file nope.txt cannot be read"),
    ("chat ./nope", NO_TARGET),
    ("chat {target} --draft ./nope", NO_DRAFTER),
    ("eval ./nope --draft {draft} --prompts chat", NO_TARGET),
    ("eval {target} --draft ./nope --prompts chat", NO_DRAFTER),
    ("eval {target} --draft {draft} --prompts nope.jsonl", NO_FILE),
    ("eval {target} --draft {draft} --data nope.jsonl", NO_FILE),
    ("serve ./nope --port 0", NO_TARGET),
    ("serve {target} --port 0 --draft ./nope", NO_DRAFTER),
    ("bench ./nope", NO_TARGET),
    ("bench {target} --draft ./nope", NO_DRAFTER),
    ("bench {target} --prompts nope.jsonl", NO_FILE),
    ("bench {target} --repeats 0", "error: repeats is 0; expected 1 or more."),
    ("bench {target} -t 0 -t 0", "error: a temperature is given twice: 0, 0."),
    ("bench serve nope", "error: the server is 'nope'; expected a URL"),
    ("train ./nope --data {talks} --out {out}", NO_TARGET),
    ("train {target} --data nope.jsonl --out {out}", NO_FILE),
    ("train {target} --data {talks} --out {out} --set init=./nope", NO_DRAFTER),
    ("adapt {draft} --target ./nope --out {out}", NO_TARGET),
    ("adapt ./nope --target {target} --out {out}", NO_DRAFTER),
    ("adapt {draft} --target {target} --prompts nope.jsonl --out {out}", NO_FILE),
    ("adapt {draft} --target {target} --out {out} --limit 0", "error: limit is 0; expected 1"),
    ("audit ./nope --draft {draft}", NO_TARGET),
    ("audit {target} --draft ./nope", NO_DRAFTER),
    ("audit {target} --draft lookup --prompts nope.jsonl", NO_FILE),
    ("doctor ./nope --draft {draft}", NO_TARGET),
    ("doctor {target} --draft ./nope", NO_DRAFTER),
    ("data check ./nope {talks}", NO_TARGET),
    ("data check {target} nope.jsonl", NO_FILE),
    ("data synth ./nope --out {out} -n 1", NO_TARGET),
    ("data answer {target} nope.jsonl --out {out}", NO_FILE),
    ("demo --target ./nope", NO_TARGET),
    ("export ./nope {out}", NO_DRAFTER),
    ("info ./nope", NO_DRAFTER),
    ("info {draft} --target ./nope", NO_TARGET),
]


def test_missing_files_and_wrong_values_are_refused(target, draft, talks, tmp_path):
    """All in one process, which has imported neither library at its end."""
    names = {"target": target, "draft": draft, "talks": talks, "out": tmp_path / "out"}
    commands = [[part.format(**names) for part in line.split()] for line, _ in REFUSED]
    script = f"""
import sys
from typer.testing import CliRunner
from domino_spec.cli.main import app
for arguments in {commands!r}:
    result = CliRunner().invoke(app, arguments)
    heavy = {{"torch", "transformers"}} & set(sys.modules)
    print(result.exit_code, heavy or "light", result.stderr.splitlines()[-1])
    if heavy:
        break
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for (command, expected), line in zip(REFUSED, lines, strict=False):
        code, weight, error = line.split(" ", 2)
        assert weight == "light", f"{command}: imported {line}"
        assert error.startswith(expected), f"{command}: {error}"
        assert code == ("2" if command.startswith("audit") else "1"), f"{command}: {line}"
    assert len(lines) == len(REFUSED)
