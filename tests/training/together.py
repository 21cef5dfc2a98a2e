"""The runs that `test_world` compares: in two processes, and the same in one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from domino_spec.errors import ConfigError
from domino_spec.targets import load_target
from domino_spec.training import Outcome, TrainConfig, open_world, prepare, train
from domino_spec.training.config import read_settings

_CPU = torch.device("cpu")
_BARE = {"rank": None, "gru_hidden_dim": None, "mask_token_id": None, "draft_steps": 3}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"variant": "medusa", **_BARE},
    "eagle3": {"variant": "eagle3", "layers": None, **_BARE},
}
REDUCED = {"draft_vocab": 40, "labels": "hard", "accumulate": 2}
HALF = {"dtype": "bfloat16", "steps": 2}


class Stopping:
    """One of the processes is told to stop, the other is not."""

    def report(self, step: int, values: dict[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def trained(folder: Path, name: str, *observers: Any, resume: bool = False, **changes: Any):
    """One run of `folder`'s settings with changes; sharding the target takes a fresh one."""
    config = TrainConfig.from_dict(
        {**read_settings(folder / "run.yaml"), "out": str(folder / name), **changes}
    )
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    with open_world(_CPU) as world:
        loaded = load_target(config.target, device=_CPU, dtype=dtype)
        run = prepare(config, world=world, loaded=loaded, observers=observers, resume=resume)
        return train(run)[0]


def in_two(folder: Path) -> None:
    """What each of two processes does."""
    assert trained(folder, "whole").finished
    stopped: Outcome = trained(folder, "stopped", Stopping())
    assert stopped.signal == signal.SIGTERM
    assert trained(folder, "stopped", resume=True).finished
    assert trained(folder, "reduced", batch_size=1, **REDUCED).finished
    assert trained(folder, "half", **HALF).finished
    for kind, changes in KINDS.items():
        assert trained(folder, kind, **changes).finished
    assert trained(folder, "timed", steps=None, max_seconds=0.05).finished
    try:
        trained(folder, "muon", optimizer="muon")
    except ConfigError as error:
        assert "several GPUs with adamw" in str(error)  # noqa: PT017
    else:
        raise AssertionError("muon was taken")


def in_one(folder: Path) -> None:
    """The same with twice the batch."""
    trained(folder, "one", batch_size=4)
    trained(folder, "one-reduced", batch_size=2, **REDUCED)
    trained(folder, "one-half", batch_size=4, **HALF)
    for kind, changes in KINDS.items():
        trained(folder, f"one-{kind}", batch_size=4, **changes)


@contextmanager
def _joined() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with _joined():
        in_two(Path(sys.argv[1]))
