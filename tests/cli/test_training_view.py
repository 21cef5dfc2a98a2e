from __future__ import annotations

import io

from rich.console import Console

from domino_spec.cli.command import Voice
from domino_spec.cli.training_view import (
    TrainingView,
    clock,
    finite,
    plan_line,
    report_lines,
)
from domino_spec.training import TrainConfig

CONFIG = TrainConfig(target="t", data=("d",), out="o", steps=40)
REPORT = {
    "loss": 3.14159, "lambda": 0.75, "learning_rate": 9e-4, "accuracy": [0.75, 0.5, 0.02],
    "run_length": 1.5, "conversations_per_second": 1234.5, "seconds_per_step": 2.0,
    "peak_memory_bytes": 12_300_000_000, "seconds_left": 60.0,
}  # fmt: skip
EVALUATION = {"tokens_per_cycle": 2.5, "tokens_per_cycle_head_off": 1.875}


def shown(view: TrainingView) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(view.render())
    return console.file.getvalue()


def live() -> tuple[TrainingView, Voice]:
    voice = Voice()
    voice.err = Console(file=io.StringIO(), force_terminal=True, width=100)
    return TrainingView(voice), voice


def test_the_panel_shows_the_numbers_that_matter():
    view, _ = live()
    view.begin(CONFIG, 0)
    assert "the first report is to come" in shown(view)
    view.report(10, REPORT)
    view.report(10, EVALUATION)
    view.report(20, {**REPORT, "loss": 2.0})
    text = shown(view)
    for part in (
        "20/40", " left", "loss                         2.0000", "0.750", "9.00e-04",
        "|▇▅▁| 75% … 2%", "right in a row               1.50", "1,234.5", "12.3 GB",
        "2.50 (1.88 with the head off, at step 10)",
    ):  # fmt: skip
        assert part in text, part


def test_the_panel_lives_and_leaves_its_last_state():
    view, voice = live()
    view.begin(CONFIG, 20)
    with view:
        view.report(40, REPORT)
        view.close()
    assert "40/40" in voice.err.file.getvalue()


def test_lines(capsys):
    view = TrainingView(Voice())
    view.begin(CONFIG, 0)
    view.report(10, REPORT)
    view.report(10, EVALUATION)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("step 10/40: loss 3.1416 · λ 0.750 · learning rate 9.00e-04 · ")
    assert first.endswith(" · 1:00 left")
    assert second == "step 10/40: acceptance length, held out 2.50 (1.88 with the head off)"


def test_json_has_no_nan(capsys):
    view = TrainingView(Voice(as_json=True, quiet=True, json_lines=True))
    view.report(1, {"loss": float("nan"), "accuracy": [float("inf"), 0.5]})
    assert capsys.readouterr().out == '{"step": 1, "loss": null, "accuracy": [null, 0.5]}\n'
    assert finite({"a": -float("inf"), "b": "x"}) == {"a": None, "b": "x"}


def test_quiet_lines_are_none(capsys):
    TrainingView(Voice(quiet=True)).report(1, REPORT)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_time_left_runs_on_between_reports(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("domino_spec.cli.training_view.time.monotonic", lambda: now[0])
    view, _ = live()
    view.begin(CONFIG, 0)
    assert "0/40 0:00" in shown(view)
    assert "left" not in shown(view)
    now[0] += 300  # compiling
    view.report(1, {"seconds_left": 90.0})
    now[0] += 5
    view.report(1, EVALUATION)  # which does not say
    assert "5:05, 1:25 left" in shown(view)
    view.report(2, {"seconds_left": 240.0})
    assert "5:05, 4:00 left" in shown(view)
    now[0] += 1000
    assert ", 0:00 left" in shown(view)


def test_time_left_is_said_before_the_first_report(capsys):
    view = TrainingView(Voice())
    view.begin(CONFIG, 0)
    view.report(6, {"seconds_per_step": 2.0, "seconds_left": 68.0})
    assert capsys.readouterr().err == "step 6/40: 1:08 left\n"


PLAN = {
    "steps": 478, "tokens": 7_831_552, "epochs": 0.9, "expected_tokens_per_cycle": [2.06, 2.441],
    "expected_from": "8 runs on record, smollm2",
}  # fmt: skip


def test_what_to_expect_is_said(capsys):
    length = "478 steps, 7,831,552 tokens, 0.9 epochs"
    said = f"{length}; acceptance length to expect: 2.1–2.4 (8 runs on record, smollm2)"
    assert plan_line(PLAN) == said
    assert plan_line({**PLAN, "expected_tokens_per_cycle": None}) == length
    view = TrainingView(Voice())
    view.report(6, {"seconds_left": 36.0, "plan": PLAN})
    view.report(100, {"tokens_per_cycle": 1.5, "expected_tokens_per_cycle": [2.25, 2.5]})
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"step 6: about {said} · 0:36 left"
    assert second == "step 100: acceptance length, held out 1.50 · expected at the end 2.2–2.5"


def test_clock_and_empty_reports():
    assert [clock(seconds) for seconds in (0.4, 65, 3661)] == ["0:00", "1:05", "1:01:01"]
    assert report_lines({}) == []
