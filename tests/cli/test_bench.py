"""`domino bench`."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from domino_spec.cli.main import app
from domino_spec.engine import measure
from domino_spec.engine.measure import Bench

ARGUMENTS = [
    "bench", "engine", "tiny", "--dtype", "float32", "--device", "cpu", "--context", "48",
    "--candidates", "32", "--tokens-per-cycle", "4.2",
]  # fmt: skip


def test_engine_as_tables(tmp_path, monkeypatch):
    paced, seconds_of = Bench.paced, measure.seconds_of
    monkeypatch.setattr(Bench, "paced", lambda *given, cycles: paced(*given, cycles=cycles // 16))
    monkeypatch.setattr(measure, "seconds_of", partial(seconds_of, repeats=1))
    path = tmp_path / "records.jsonl"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--rows", "2", "--out", str(path)])
    assert result.exit_code == 0, result.output
    for words in ("plain step", "cycle of 15", "draft backbone", "Transformers loop, plain",
                  "acceptance forced", "4.2 a cycle"):  # fmt: skip
        assert words in result.stdout
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert record["environment"]["hardware"]


@pytest.mark.slow
def test_engine_as_json():
    result = CliRunner().invoke(app, [*ARGUMENTS, "--no-reference", "--json", "--rows", "2"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["batches"][0]["rows"] == 2
    assert "reference" not in record


def test_an_unknown_shape_is_one_line():
    result = CliRunner().invoke(app, ["bench", "engine", "gpt-7"])
    assert result.exit_code == 1
    assert "no shape is called" in result.stderr
