"""What `test_world` lets two processes do, one run after the other; torchrun starts it."""

import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from domino_spec.cli.main import app
from domino_spec.cli.training_view import LineView

_BARE = ("rank=null", "gru_hidden_dim=null", "mask_token_id=null", "draft_steps=3")
KINDS = {
    "medusa": ("variant=medusa", *_BARE),
    "eagle3": ("variant=eagle3", "layers=null", *_BARE),
}


def trained(folder, name, *changes, resume=False):
    """`domino train` with the settings in `folder` and these changes."""
    changes = [word for change in (f"out={folder / name}", *changes) for word in ("--set", change)]
    words = ["--config", str(folder / "run.yaml"), *changes, "--no-tensorboard"]
    return CliRunner().invoke(app, ["train", *words, *(["--resume"] if resume else [])])


def stopping(report):
    """One of the processes is told to stop, the other is not."""

    def report_and_stop(self, step, values):
        report(self, step, values)
        if step == 3 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    return report_and_stop


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def check(name, *changes, code=0, **options):
        result = trained(folder, name, *changes, **options)
        assert result.exit_code == code, result.output
        return result

    check("whole")
    with mock.patch.object(LineView, "report", stopping(LineView.report)):
        check("stopped", code=128 + signal.SIGTERM)
    check("stopped", resume=True)
    check("reduced", "draft_vocab=40", "labels=hard", "accumulate=2", "rows=1")
    check("half", "dtype=bfloat16", "steps=2")
    for kind, changes in KINDS.items():
        check(kind, *changes)
    check("timed", "steps=null", "max_seconds=0.05")
    refused = check("muon", "optimizer=muon", code=1)
    assert dist.get_rank() > 0 or "several GPUs with adamw" in refused.stderr
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
