from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner, Result

from domino_spec.checkpoints import save_drafter
from domino_spec.cli.main import app
from domino_spec.cli.training_view import TrainingView
from domino_spec.drafter import Medusa, MedusaConfig
from domino_spec.targets import load
from domino_spec.training import observers
from tests.cli import tiny

_LEARNT = ("vocab_size", "embedding_scale", "logit_scale", "logit_softcap", "batch_refusal")
# Else every call of the command line builds all its commands anew.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.fixture
def curves():
    """For tests that look at the curves of a training run."""


@pytest.fixture(autouse=True)
def _no_curves(request, monkeypatch):
    """Drawing takes three times as long as training does here."""
    if "curves" not in request.fixturenames:
        monkeypatch.setattr(observers, "draw_curves", lambda _log, _picture: None)


_PROBED: dict[tuple[str, ...], dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def _probe_once(monkeypatch):
    """Nearly every command loads one of the same few targets, which its first probe has proven."""
    probe = load.probe_target

    def probe_target(target):
        key = (target.name, str(target.dtype), repr(target.model.config))
        if key not in _PROBED:
            probe(target)
            _PROBED[key] = {name: getattr(target, name) for name in _LEARNT}
        vars(target).update(_PROBED[key])

    monkeypatch.setattr(load, "probe_target", probe_target)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> str:
    return str(tiny.save_target(tmp_path_factory.mktemp("target"), tokenizer=tiny.make_tokenizer()))


@pytest.fixture(scope="session")
def base_target(tmp_path_factory) -> str:
    """A target whose tokenizer has no chat template."""
    tokenizer = tiny.make_tokenizer(template=False)
    return str(tiny.save_target(tmp_path_factory.mktemp("base"), tokenizer=tokenizer))


@pytest.fixture(scope="session")
def wide_target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    return str(tiny.save_target(folder, hidden=64, tokenizer=tiny.make_tokenizer()))


@pytest.fixture(scope="session")
def mute_target(tmp_path_factory) -> str:
    """A target without a tokenizer."""
    return str(tiny.save_target(tmp_path_factory.mktemp("mute")))


@pytest.fixture(scope="session")
def draft(tmp_path_factory) -> str:
    return str(tiny.save_draft(Path(tmp_path_factory.mktemp("draft")) / "domino"))


@pytest.fixture(scope="session")
def dflash(tmp_path_factory) -> str:
    return str(tiny.save_draft(Path(tmp_path_factory.mktemp("draft")) / "dflash", head=False))


@pytest.fixture(scope="session")
def medusa(tmp_path_factory) -> str:
    config = MedusaConfig(
        hidden_size=tiny.HIDDEN, vocab_size=tiny.VOCAB, num_target_layers=tiny.LAYERS, num_heads=3
    )
    folder = Path(tmp_path_factory.mktemp("baseline")) / "medusa"
    return str(save_drafter(Medusa.fresh(config, seed=0), folder))


@pytest.fixture
def domino():
    def run(*arguments: object, stdin: str | None = None, **env: str) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env=env)

    return run


@pytest.fixture(scope="session")
def talks(tmp_path_factory):
    """Conversations, and a row that is none."""
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    draw = random.Random(0)
    words = " ".join(tiny.LINES).split()
    rows = []
    for index in range(30):
        question, answer = (" ".join(draw.choices(words, k=k)) for k in (4, 12))
        messages = [
            {"role": "user", "content": f"{question} {index}"},
            {"role": "assistant", "content": answer},
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n{broken\n", encoding="utf-8")
    return path


@pytest.fixture
def train(domino, target, talks, tmp_path):
    def run(*arguments, out="run", basics=(target, "--data", talks)):
        return domino("train", *basics, "--out", tmp_path / out, *arguments)

    return run


@pytest.fixture
def signalled(monkeypatch):
    """Send a signal to ourselves at the first report."""
    report = TrainingView.report

    def arm(number):
        def report_once(self, step, values):
            report(self, step, values)
            monkeypatch.setattr(TrainingView, "report", report)
            os.kill(os.getpid(), number)

        monkeypatch.setattr(TrainingView, "report", report_once)

    return arm
