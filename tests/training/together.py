"""What `test_world` lets two processes do, one run after the other; torchrun starts it."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from domino_spec.errors import ConfigError
from domino_spec.training import __main__ as command

_BARE = ("rank=null", "gru_hidden_dim=null", "mask_token_id=null", "draft_steps=3")
KINDS = {
    "medusa": ("variant=medusa", *_BARE),
    "eagle3": ("variant=eagle3", "layers=null", *_BARE),
}


class Stopping(command._Lines):
    """One of the processes is told to stop, the other is not."""

    def report(self, step, values):
        super().report(step, values)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = command._Lines
    run = str(folder / "run.yaml")

    def trained(name, *arguments):
        return command.main([run, f"out={folder / name}", *arguments])

    assert trained("whole") == 0
    command._Lines = Stopping
    assert trained("stopped") == 128 + signal.SIGTERM
    command._Lines = lines
    assert trained("stopped", "--resume") == 0
    assert trained("reduced", "draft_vocab=40", "labels=hard", "accumulate=2", "batch_size=1") == 0
    assert trained("half", "dtype=bfloat16", "steps=2") == 0
    for kind, changes in KINDS.items():
        assert trained(kind, *changes) == 0
    assert trained("timed", "steps=null", "max_seconds=0.05") == 0
    try:
        trained("muon", "optimizer=muon")
    except ConfigError as error:
        assert "several GPUs with adamw" in str(error)  # noqa: PT017
    else:
        raise AssertionError("muon was taken")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
