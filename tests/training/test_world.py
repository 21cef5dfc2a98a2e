"""Two processes that share the drafter are one process with twice the batch."""

import socket

import pytest
import torch

from domino_spec.checkpoints import load_drafter
from domino_spec.errors import DataError
from domino_spec.training.observers import read_log
from domino_spec.training.state import Checkpoints
from tests.support.forked import ask
from tests.training.helpers import assert_same
from tests.training.together import STEPS, in_one, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs of two processes (`together.py`) and the same of one."""
    folder = tmp_path_factory.mktemp("world")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ask("tests.training.together", "both", str(folder), port)
    in_one(folder)
    return folder


def curves(out, *names):
    return torch.tensor([[line[name] for name in names] for line in read_log(out / "log.jsonl")])


@pytest.mark.parametrize(
    ("two", "one"),
    [
        ("whole", "one"),
        ("reduced", "one-reduced"),
        ("medusa", "one-medusa"),
        ("eagle3", "one-eagle3"),
    ],
)
def test_losses_and_weights_are_those_of_one_process(folder, two, one):
    names = ("loss", "grad_norm", "lambda", "learning_rate")
    found, wanted = (curves(folder / name, *names) for name in (two, one))
    assert len(wanted) == STEPS
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    states = [Checkpoints(folder / name, keep=2).latest() for name in (two, one)]
    for name, weight in states[1].weights.items():
        torch.testing.assert_close(states[0].weights[name], weight, atol=1e-4, rtol=1e-4, msg=name)
    for ours, theirs in zip(states[0].optimiser, states[1].optimiser, strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        for index, values in theirs["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(
                    ours["state"][index][name], value, atol=1e-5, rtol=1e-3, msg=name
                )


def test_processes_agree_when_their_time_is_over(folder):
    """Else one would wait for the other for ever."""
    lines = read_log(folder / "timed" / "log.jsonl")
    assert lines[-1]["training_seconds"] >= 0.05 > lines[-2]["training_seconds"]
    assert Checkpoints(folder / "timed", keep=2).steps()[-1] == lines[-1]["step"]


def test_counts_are_those_of_all_processes(folder):
    names = ("accuracy", "base_accuracy", "epoch")
    for found, wanted in zip(*(read_log(folder / n / "log.jsonl") for n in ("whole", "one"))):  # noqa: B905
        assert [found[name] for name in names] == [wanted[name] for name in names]


def test_half_precision_is_close(folder):
    found, wanted = (curves(folder / name, "loss") for name in ("half", "one-half"))
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=1e-2)
    state = Checkpoints(folder / "half", keep=2).latest()
    assert all(weight.dtype == torch.float32 for weight in state.weights.values())
    assert any(not w.equal(w.bfloat16().float()) for w in state.weights.values()), "masters"
    assert load_drafter(folder / "half" / "drafter").drafter.dtype == torch.bfloat16


def test_a_stopped_run_goes_on_exactly(folder):
    """One process was told to stop; both stopped at that step, saved and went on."""
    whole, stopped = (Checkpoints(folder / name, keep=2) for name in ("whole", "stopped"))
    assert stopped.steps() == [4, 5]
    assert curves(folder / "stopped", "loss").equal(curves(folder / "whole", "loss"))
    assert_same(stopped.latest().weights, whole.latest().weights)
    assert_same(stopped.latest().optimiser, whole.latest().optimiser)


def test_the_saved_drafter_is_whole(folder):
    for place in ("drafter", "checkpoints/step-00000005"):
        drafter = load_drafter(folder / "whole" / place).drafter
        weights = Checkpoints(folder / "whole", keep=2).latest().weights
        for name, parameter in drafter.named_parameters():
            assert parameter.equal(weights[name]), name


def test_the_log_has_one_author(folder):
    lines = (folder / "whole" / "log.jsonl").read_text().splitlines()
    assert len(lines) == STEPS


def test_another_number_of_processes_cannot_go_on(folder):
    with pytest.raises(DataError, match="belongs to world 2, but this run has 1"):
        trained(folder, "whole", resume=True)
