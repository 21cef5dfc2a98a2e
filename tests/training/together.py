"""The runs that `test_world` compares: in two processes, and the same in one."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from domino_spec.errors import ConfigError
from domino_spec.training import Outcome, open_world, prepare, train
from tests.training.helpers import bigram_config, bigram_corpus, loaded_bigrams

STEPS = 5
_CPU = torch.device("cpu")
KINDS = ("medusa", "eagle3")
REDUCED = {"draft_vocab": 30, "labels": "hard", "accumulate": 2}
HALF = {"dtype": "bfloat16", "steps": 2}


class Stopping:
    """One of the processes is told to stop, the other is not."""

    def report(self, step: int, values: dict[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def trained(
    folder: Path, name: str, *observers: Any, resume: bool = False, **changes: Any
) -> Outcome:
    """One run on bigrams; its target is its own, since several processes shard it."""
    (data := folder / str(os.getpid())).mkdir(exist_ok=True)
    # One process would take Muon.
    settings = {
        "steps": STEPS,
        "log_every": 1,
        "save_every": 2,
        "held_out": 4,
        "optimizer": "adamw",
    }
    settings |= changes
    config = bigram_config(folder / name, **settings)
    loaded = loaded_bigrams()
    if config.dtype == "bfloat16":
        loaded.target.model.to(torch.bfloat16)
    with open_world(_CPU) as world:
        run = prepare(
            config, world=world, loaded=loaded, corpus=bigram_corpus(data), observers=observers,
            resume=resume,
        )  # fmt: skip
        return train(run)[0]


def in_two(folder: Path) -> None:
    """What each of two processes does."""
    assert trained(folder, "whole").finished
    stopped = trained(folder, "stopped", Stopping())
    assert stopped.signal == signal.SIGTERM
    assert trained(folder, "stopped", resume=True).finished
    assert trained(folder, "reduced", batch_size=1, **REDUCED).finished
    assert trained(folder, "half", **HALF).finished
    for kind in KINDS:
        assert trained(folder, kind, variant=kind).finished
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
    for kind in KINDS:
        trained(folder, f"one-{kind}", batch_size=4, variant=kind)


@contextmanager
def _joined() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def both(folder: str, port: int) -> None:
    """This process and a fork of it; both have imported everything by now."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    other = os.fork()
    os.environ |= address | {"RANK": "0" if other else "1"}
    try:
        with _joined():
            in_two(Path(folder))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if not other:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
