"""`python -m domino_spec.training run.yaml [name=value ...] [--resume]`: without the command line.

For scripts and torchrun: `torchrun --nproc-per-node 8 -m domino_spec.training run.yaml`. The first
process speaks, in lines of JSON; `domino train` is the same for people.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import torch

from domino_spec.errors import ConfigError, DominoError
from domino_spec.targets import default_device
from domino_spec.training import TrainConfig, open_world, train
from domino_spec.training.config import parse_assignments, read_settings
from domino_spec.training.prepare import prepare

_USAGE = "usage: python -m domino_spec.training run.yaml [name=value ...] [--resume]"


class _Lines:
    """One line of JSON a report; the lists are in the run's own log."""

    def report(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: v for name, v in values.items() if isinstance(v, (int, float))}
        _say(
            step=step, **{n: round(v, 5) if math.isfinite(v) else None for n, v in numbers.items()}
        )

    def close(self) -> None:
        pass


def main(arguments: list[str]) -> int:
    """Train as the file and the changes say; 128 + signal if a signal ended it."""
    resume = "--resume" in arguments
    file, *changes = [argument for argument in arguments if argument != "--resume"] or [""]
    if not file or file.startswith("-"):
        raise ConfigError(_USAGE)
    config = TrainConfig.from_dict({**read_settings(file), **parse_assignments(changes)})
    with open_world(_device(config.device)) as world:
        run = prepare(
            config,
            world=world,
            observers=[_Lines()],
            resume=resume,
            notice=lambda line: _say(notice=line) if world.leads else None,
        )
        outcome, drafter = train(run)
    if world.leads:
        _say(finished=outcome.finished, step=outcome.step, drafter=drafter and str(drafter))
    return 128 + outcome.signal if outcome.signal and not outcome.finished else 0


def _device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; expected cpu or cuda, for example.") from error


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DominoError as error:
        first = os.environ.get("RANK", "0") == "0"  # all processes meet the same error
        sys.exit(f"error: {error}" if first else 1)
