"""What a command imports before it has something to compute: neither PyTorch nor Transformers."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """
import json, sys
from typer.testing import CliRunner
from domino_spec.cli.main import app
found = []
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    found.append((result.exit_code, result.stdout, result.stderr, heavy))
    if heavy:
        break
print(json.dumps(found))
"""


def light(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code and both outputs of each, in one process that has imported neither at its end."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(commands)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for command, (*_, heavy) in zip(commands, found, strict=False):
        assert not heavy, f"{command} imported {heavy}"
    assert len(found) == len(commands)
    return [(code, stdout, stderr) for code, stdout, stderr, _ in found]


def test_help_version_and_info(draft):
    *helped, described, packed = light(
        ["--help"], ["--version"], ["bench", "run", "--help"], ["adapt", "--help"],
        ["info", draft], ["info", "released:smollm2-135m-instruct", "--json"],
    )  # fmt: skip
    assert [code for code, *_ in (*helped, described, packed)] == [0] * 6
    assert all(stdout for _, stdout, _ in helped)
    assert "Domino (backbone and causal head)" in described[1]
    assert '"layout": "packed"' in packed[1]


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
    names = {"target": target, "draft": draft, "talks": str(talks), "out": str(tmp_path / "out")}
    commands = [[part.format(**names) for part in line.split()] for line, _ in REFUSED]
    for (command, expected), (code, _, stderr) in zip(REFUSED, light(*commands), strict=True):
        error = stderr.splitlines()[-1]
        assert error.startswith(expected), f"{command}: {error}"
        assert code == (2 if command.startswith("audit") else 1), f"{command}: {error}"
