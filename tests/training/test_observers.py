"""Where a run is written down."""

import json

import numpy as np
import pytest
from matplotlib import image

from domino_spec.checkpoints import describe
from domino_spec.training import train
from domino_spec.training.observers import JsonlLog, TensorBoard, draw_curves, read_log
from tests.training.helpers import ready


def report(step, loss=1.0):
    return {"step": step, "loss": loss, "lambda": 0.5, "accuracy": [0.5, 0.25]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, loaded):
    out = tmp_path_factory.mktemp("observed") / "run"
    board = TensorBoard(out / "tensorboard")
    curriculum = {"curriculum_ratio": 1.0, "base_weight": 0.0}
    train(ready(out, corpus, loaded, board, eval_every=6, save_every=0, **curriculum))
    return out


def test_a_run_logs_what_it_did(finished):
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [4, 8, 12]
    assert [line["step"] for line in lines if "tokens_per_cycle" in line] == [6, 12]
    for line in trained:
        assert {
            "loss", "grad_norm", "lambda", "learning_rate", "epoch", "accuracy", "base_accuracy",
            "run_length", "conversations_per_second", "seconds_per_step",
        } <= set(line)  # fmt: skip
    assert [line["lambda"] for line in trained] == pytest.approx([0.75, 5 / 12, 1 / 12], abs=1e-5)


def test_numbers_are_short(tmp_path):
    log = JsonlLog(tmp_path / "deep" / "log.jsonl")
    log.report(3, {"loss": 1 / 3, "accuracy": [2 / 3], "epoch": 1})
    log.close()
    text = (tmp_path / "deep" / "log.jsonl").read_text()
    assert text == '{"step": 3, "loss": 0.333333, "accuracy": [0.666667], "epoch": 1}\n'


def test_lines_are_there_at_once(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    log.report(1, {"loss": 1.0})
    assert len(read_log(tmp_path / "log.jsonl")) == 1
    log.close()


def test_where_a_resumed_run_repeats_a_step_the_later_one_counts(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [report(1), report(2), {"step": 2, "tokens_per_cycle": 1.5}, report(3, loss=9.0)]
    again = [report(3, loss=0.5), report(4), {"step": 4, "tokens_per_cycle": 2.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines + again))
    found = read_log(path)
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4]
    assert [line["loss"] for line in found if line["step"] == 3] == [0.5]
    assert [line["tokens_per_cycle"] for line in found if "loss" not in line] == [1.5, 2.0]


def test_a_line_that_was_cut_off_harms_no_other(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(report(1)) + '\n{"step": 2, "lo')
    log = JsonlLog(path)
    log.report(2, {"loss": 0.25})
    log.close()
    assert [(line["step"], line["loss"]) for line in read_log(path)] == [(1, 1.0), (2, 0.25)]


def test_a_fresh_run_begins_its_log_anew(tmp_path, corpus, loaded):
    """One that ended before its first checkpoint may have left a log."""
    (tmp_path / "log.jsonl").write_text(json.dumps(report(40)) + "\n")
    train(ready(tmp_path, corpus, loaded, steps=2, log_every=1))
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 2]


def assert_picture(path):
    """A PNG that shows something: several colours, more than white."""
    pixels = image.imread(path)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    colours = (pixels[..., :3] * 255).astype(int) @ [1, 256, 65536]
    assert len(np.unique(colours)) > 50
    columns = (pixels[..., :3] < 0.9).any(axis=(0, 2)).reshape(-1)
    third = len(columns) // 3
    assert all(columns[part : part + third].mean() > 0.5 for part in (0, third, 2 * third))


def test_the_drafter_keeps_what_was_last_measured_of_it(finished):
    measured = [
        r["tokens_per_cycle"] for r in read_log(finished / "log.jsonl") if "tokens_per_cycle" in r
    ]
    assert describe(finished / "drafter").provenance.tokens_per_cycle == pytest.approx(
        measured[-1], abs=1e-4
    )


def test_curves_are_a_picture(finished, tmp_path):
    draw_curves(finished / "log.jsonl", tmp_path / "curves.png")
    assert_picture(tmp_path / "curves.png")


def test_curves_of_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_files_hold_the_curves(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert list((finished / "tensorboard").glob("events.out.tfevents.*"))
    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss", "lambda", "accuracy/1", "accuracy/6", "tokens_per_cycle"} <= tags
    assert [event.step for event in events.Scalars("loss")] == [4, 8, 12]
    logged = [line["loss"] for line in read_log(finished / "log.jsonl") if "loss" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(logged, rel=1e-4)
