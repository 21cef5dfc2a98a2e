"""Runs that are killed, told to stop, go wrong or are taken up again."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from domino_spec.checkpoints import load_drafter
from domino_spec.errors import DataError, TrainingError
from domino_spec.training import Trainer, start, train
from domino_spec.training.config import read_settings
from domino_spec.training.observers import read_log
from domino_spec.training.start import measure_sizes
from domino_spec.training.state import STATE_FILE, Checkpoints
from domino_spec.training.trainer import Watch
from tests.training.helpers import (
    Reports,
    assert_same,
    bigram_corpus,
    loaded_bigrams,
    ready,
    state_of,
    weights_of,
)

STEPS = 12  # saved every 4
ROOT = Path(__file__).parents[2]


class At:
    """Does something when a step is reported."""

    def __init__(self, step, action):
        self._step, self._action = step, action

    def report(self, step, values):
        if step == self._step and "loss" in values:
            self._action()

    def close(self):
        pass


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def losses(out):
    return {report["step"]: report["loss"] for report in read_log(out / "log.jsonl")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, loaded):
    """A run that nothing interrupts: its folder, all it learnt, its losses."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run = ready(out, corpus, loaded, log_every=1)
    outcome, _ = train(run)
    assert outcome.finished
    return out, state_of(run), losses(out)


def resumed(out, corpus, loaded, **changes):
    run = ready(out, corpus, loaded, resume=True, log_every=1, **changes)
    started = run.trainer.step
    outcome, folder = train(run)
    assert outcome.finished
    assert outcome.step == run.config.steps
    return run, started, folder


@pytest.mark.slow  # a process of its own; a stopped run goes the same way
def test_a_killed_run_goes_on_exactly(tmp_path, corpus, loaded, whole):
    out = tmp_path / "run"
    path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.killed", str(out), "6"],
        env=environment, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert Checkpoints(out, keep=2).steps() == [4]
    assert not (out / "drafter").exists()
    run, started, folder = resumed(out, corpus, loaded)
    assert started == 4
    assert_same(state_of(run), whole[1])
    assert losses(out) == whole[2]
    assert len(losses(out)) == STEPS
    for name, weight in load_drafter(folder).drafter.named_parameters():
        assert weight.equal(whole[1]["weights"][name]), name


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_run_that_is_told_to_stop_does_not_wait_for_an_evaluation(
    when, kind, tmp_path, corpus, loaded
):
    """At step 4 both a checkpoint and an evaluation are due."""
    reports, evaluations = Reports(), []

    def stop():
        os.kill(os.getpid(), kind)

    def evaluate():
        evaluations.append(run.trainer.step)
        try:
            if when == "during":
                stop()
        except Exception:  # as code inside an evaluation might
            pytest.fail("a signal is no error of the evaluation")
        return {"tokens_per_cycle": 9.0}

    observers = [At(4, stop), reports] if when == "before" else [reports]
    run = ready(tmp_path, corpus, loaded, *observers, log_every=1, eval_every=4)
    run.trainer._evaluate = evaluate
    outcome, folder = train(run)
    assert evaluations == ([] if when == "before" else [4])
    assert (outcome.step, outcome.signal, folder) == (4, kind, None)
    assert "tokens_per_cycle" not in outcome.last
    assert Checkpoints(tmp_path, keep=2).steps() == [4]
    assert [told for told, _ in reports.trained] == [1, 2, 3, 4]


@pytest.mark.parametrize("step", [6, 8, 12])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_exactly(
    step, tmp_path, corpus, loaded, whole
):
    """In the middle, at a checkpoint, and at the end."""
    reports = Reports()
    run = ready(tmp_path, corpus, loaded, At(step, terminate), reports, log_every=1)
    before = signal.getsignal(signal.SIGTERM)
    outcome, folder = train(run)
    assert signal.getsignal(signal.SIGTERM) is before
    assert outcome.signal == signal.SIGTERM
    assert outcome.step == step
    assert outcome.finished is (folder is not None) is (step == STEPS)
    assert Checkpoints(tmp_path, keep=2).steps()[-1] == step
    assert [told for told, _ in reports.trained] == list(range(1, step + 1)), "each step once"
    again, started, folder = resumed(tmp_path, corpus, loaded)
    assert started == step
    assert folder is not None
    assert_same(state_of(again), whole[1])
    assert losses(tmp_path) == whole[2]


def test_a_stop_between_reports_tells_what_was_done(tmp_path, corpus, loaded, whole):
    reports, calls = Reports(), []
    run = ready(tmp_path, corpus, loaded, reports, log_every=100, save_every=0)
    learn = run.trainer.learn

    def stops_in_step_3(*arguments):
        calls.append(1)
        if len(calls) == 3:
            terminate()
        return learn(*arguments)

    run.trainer.learn = stops_in_step_3
    assert train(run)[0].step == 3
    ((step, values),) = reports.trained
    assert step == 3
    assert values["loss"] == pytest.approx(sum(whole[2][s] for s in (1, 2, 3)) / 3, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "pack": 6},  # from the fifth step on
        {"optimizer": "muon", "pack": 4},
        {"draft_vocab": 30, "accumulate": 2},
    ],
    ids=str,
)
def test_other_runs_go_on_exactly_too(tmp_path, corpus, loaded, options):
    options = {**options, "steps": 6}
    whole = ready(tmp_path / "whole", corpus, loaded, log_every=1, **options)
    train(whole)
    stop = 5 if "pack" in options else 3
    train(ready(tmp_path / "stopped", corpus, loaded, At(stop, terminate), log_every=1, **options))
    again, started, _ = resumed(tmp_path / "stopped", corpus, loaded, **options)
    assert started == stop
    assert_same(state_of(again), state_of(whole))
    assert all(weight.dtype == torch.float32 for weight in weights_of(again).values())


def test_a_finished_run_is_finished_and_measured(tmp_path, corpus, loaded, whole):
    out = shutil.copytree(whole[0], tmp_path / "run")
    run = ready(out, corpus, loaded, resume=True, eval_every=4)
    assert run.trainer.step == STEPS
    outcome, folder = train(run)
    assert outcome.finished
    assert load_drafter(folder).provenance.tokens_per_cycle == outcome.last["tokens_per_cycle"]


def test_scales_are_read_with_the_weights(tmp_path, corpus, loaded, whole, monkeypatch):
    """States of other sizes, as of another machine or other data, must not change a run."""
    out, older = tmp_path / "run", tmp_path / "older"
    train(ready(out, corpus, loaded, At(6, terminate), log_every=1))
    shutil.copytree(out, older)
    path = Checkpoints(older, keep=2).path(6) / STATE_FILE
    state = torch.load(path, weights_only=True)
    del state["scales"]
    torch.save(state, path)

    def twice_as_large(*arguments):
        sizes = measure_sizes(*arguments)
        return replace(sizes, captured=2 * sizes.captured)

    monkeypatch.setattr(start, "measure_sizes", twice_as_large)
    assert_same(state_of(resumed(out, corpus, loaded)[0]), whole[1])
    run, started, _ = resumed(older, corpus, loaded)
    assert started == 6, "checkpoints without scales are read too"
    with pytest.raises(AssertionError):
        assert_same(state_of(run), whole[1])


# What goes wrong.


@torch.no_grad()
def spoil_weights(run):
    masters = run.trainer.masters
    for weights in (masters.parameters, masters.model):
        weights[0].data.view(-1)[0] = float("nan")


def spoil_gradients(run):
    """The loss stays a number; the step that follows does not."""
    parameter = run.trainer.masters.model[0]
    parameter.register_hook(lambda gradient: gradient * float("nan"))


@pytest.mark.parametrize(
    ("spoil", "words"), [(spoil_weights, "the loss is nan"), (spoil_gradients, "norm is nan")]
)
@pytest.mark.parametrize("step", [6, 7])  # found between checkpoints, and where one is due
def test_a_loss_that_is_no_number_stops_before_anything_is_saved(
    step, spoil, words, tmp_path, corpus, loaded
):
    reports = Reports()
    spoiler = At(step, lambda: spoil(run))
    run = ready(tmp_path, corpus, loaded, spoiler, reports, log_every=1, keep=1)
    with pytest.raises(TrainingError, match=words) as raised:
        train(run)
    kept = Checkpoints(tmp_path, keep=1)
    assert kept.steps() == [4]
    assert f"stopped at step {step + 1}" in str(raised.value)
    assert f"last good checkpoint is {kept.path(4)}" in str(raised.value)
    assert "learning_rate" in str(raised.value)
    drafter = load_drafter(kept.path(4)).drafter
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    again, started, _ = resumed(tmp_path, corpus, loaded, keep=1)
    assert started == 4
    assert all(weight.isfinite().all() for weight in weights_of(again).values())


def test_trouble_before_any_checkpoint_says_so(tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded, log_every=1)
    spoil_weights(run)
    with pytest.raises(TrainingError, match="no checkpoint had been written"):
        train(run)


def test_trouble_after_a_resume_names_the_checkpoint_it_came_from(tmp_path, corpus, loaded):
    train(ready(tmp_path, corpus, loaded, At(5, terminate), log_every=1))
    run = ready(tmp_path, corpus, loaded, resume=True, log_every=1)
    spoil_weights(run)
    with pytest.raises(TrainingError, match="checkpoint is .*step-00000005"):
        train(run)


def test_a_loss_that_runs_away_stops_the_run(tmp_path, corpus, loaded):
    run = ready(
        tmp_path, corpus, loaded, log_every=1, learning_rate=50.0, clip=1e9, diverge_factor=1.5,
        warmup_ratio=0.3, steps=40,
    )  # fmt: skip
    with pytest.raises(TrainingError, match="the loss rose to .* from its best of"):
        train(run)


def test_what_counts_as_running_away():
    watch = Watch(2.0, patience=2)
    assert [watch.see(loss) for loss in (4.0, 2.0, 1.0, 1.5, 1.2)] == [None] * 5
    assert watch.see(20.0) is None, "one bad report is no trend"
    assert "rose" in watch.see(20.0)
    for loss in ("nan", "inf", "-inf"):
        assert "the loss is" in Watch(2.0).see(float(loss))
    assert "norm" in Watch(2.0).see(1.0, float("inf"))


# Checkpoints.


def test_only_the_newest_are_kept(tmp_path, corpus, loaded):
    train(ready(tmp_path, corpus, loaded, save_every=2, keep=3))
    assert Checkpoints(tmp_path, keep=3).steps() == [8, 10, 12]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000008", "step-00000010", "step-00000012",
    ]  # fmt: skip


def test_an_interrupted_save_leaves_only_complete_checkpoints(
    tmp_path, corpus, loaded, whole, monkeypatch
):
    """The disk is full at the second checkpoint: the first is what a resumed run takes."""
    save, calls = torch.save, []

    def fails(value, file):
        calls.append(1)
        save(value, file)
        if len(calls) == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space left"):
        train(ready(tmp_path, corpus, loaded, log_every=1))
    monkeypatch.undo()
    kept = Checkpoints(tmp_path, keep=2)
    assert kept.steps() == [4]
    assert [p.name for p in kept.folder.iterdir() if not p.name.startswith(".")] == [
        kept.path(4).name
    ]
    run, started, _ = resumed(tmp_path, corpus, loaded)
    assert started == 4
    assert_same(state_of(run), whole[1])
    assert not list(kept.folder.glob(".*")), "what was left lying about is gone"


def test_a_folder_without_a_state_is_no_checkpoint(tmp_path, corpus, loaded):
    train(ready(tmp_path, corpus, loaded, keep=5))
    kept = Checkpoints(tmp_path, keep=5)
    (kept.path(12) / STATE_FILE).unlink()
    (kept.folder / "notes").mkdir()
    assert kept.steps() == [4, 8]
    assert kept.latest().step == 8


def test_nothing_to_resume_is_an_error(tmp_path, corpus, loaded):
    with pytest.raises(TrainingError, match="no complete checkpoint"):
        ready(tmp_path, corpus, loaded, resume=True)


def test_a_run_is_not_written_over(corpus, loaded, whole):
    out, _, told = whole
    with pytest.raises(TrainingError, match="already holds a run at step 12; resume"):
        ready(out, corpus, loaded)
    assert losses(out) == told


def test_other_settings_are_refused_by_name_and_write_nothing(corpus, loaded, whole):
    out = whole[0]
    settings = read_settings(out / "config.yaml")
    with pytest.raises(TrainingError, match="learning_rate was 0.003 and is 0.1; seed was 0 and"):
        ready(out, corpus, loaded, resume=True, learning_rate=0.1, seed=5)
    with pytest.raises(TrainingError, match="steps was 12 and is 13"):
        ready(out, corpus, loaded, resume=True, steps=13)
    with pytest.raises(TrainingError, match="rank was 8 and is 4"):
        ready(out, corpus, loaded, resume=True, rank=4)
    assert read_settings(out / "config.yaml") == settings


def test_other_data_are_refused(tmp_path, loaded, whole):
    with pytest.raises(DataError, match="fingerprint"):
        ready(whole[0], bigram_corpus(tmp_path, count=60), loaded, resume=True)


def test_where_and_how_a_run_is_watched_may_change(corpus, loaded, whole):
    run = ready(whole[0], corpus, loaded, resume=True, log_every=7, keep=1, save_every=3)
    assert isinstance(run.trainer, Trainer)
    assert run.trainer.step == STEPS


def test_another_target_of_the_same_shape_is_refused(tmp_path, corpus):
    train(ready(tmp_path, corpus, loaded_bigrams(), steps=4))
    other = loaded_bigrams()
    with torch.no_grad():
        other.target.model.lm_head.weight.mul_(1.5)
    with pytest.raises(TrainingError, match="target_weights was"):
        ready(tmp_path, corpus, other, steps=4, resume=True)
