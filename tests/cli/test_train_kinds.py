"""`domino train` of the baselines, and for a time."""

from __future__ import annotations

import json

import pytest
import yaml

from domino_spec.cli.training_view import plan_line
from domino_spec.training.forecast import Forecast

FAST = (
    "--length", 64, "--batch-size", 2, "--anchors", 4, "--size", "small", "--eval-every", 0,
    "--no-tensorboard",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_baselines_are_trained_by_the_same_command(train, domino, target, tmp_path, kind):
    result = train("--kind", kind, "--draft-steps", 2, "--steps", 3, "--log-every", 1, *FAST)
    assert result.exit_code == 0, result.output
    assert f"{kind} drafter" in result.stderr
    assert "domino generate" in result.stderr.replace("\n", " ")
    folder = tmp_path / "run" / "drafter"
    assert json.loads((folder / "config.json").read_text())["drafter"] == kind
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["variant"] == kind
    told = train("--kind", kind, "--rank", 4, *FAST, out="other")
    assert told.exit_code == 1
    assert f"{kind} drafters have no --rank" in told.stderr


def test_a_run_over_seconds_tells_its_steps(train, tmp_path):
    result = train("--max-seconds", 0.05, "--log-every", 1, "--json", *FAST)
    assert result.exit_code == 0, result.output
    first, *_, last = map(json.loads, result.stdout.splitlines())
    assert (first["config"]["steps"], first["config"]["max_seconds"]) == (None, 0.05)
    assert last["finished"]
    assert last["step"] >= 4
    lines = train("--max-seconds", 0.05, "--log-every", 1, *FAST, out="again").stderr
    assert "0.05 s of steps" in lines
    assert "step 1:" in lines
    both = train("--max-seconds", 100, "--steps", 3, *FAST, out="both")
    assert both.exit_code == 0, both.output
    assert "3 steps, at most 100 s of steps, of " in both.stderr
    assert "overfits" not in both.stderr
    many = train("--max-seconds", 0.02, "--epochs", 17, *FAST, out="many")
    assert many.exit_code == 0, many.output
    assert "overfits" not in many.stderr, "it ends long before"


@pytest.mark.parametrize(("epochs", "said"), [(16, False), (17, True)])
def test_too_many_epochs_are_said_beforehand(epochs, said):
    plan = Forecast(
        tokens_per_step=1, steps_per_epoch=10.0, recorded_shape=False, from_scratch=False
    ).plan(epochs * 10)
    assert ("overfits" in plan_line(plan)) is said
