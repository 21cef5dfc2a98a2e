"""`python -m domino_spec.training run.yaml [name=value ...]`: training without the command line.

What torchrun starts on every GPU: `torchrun --nproc-per-node 8 -m domino_spec.training run.yaml`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from domino_spec.errors import ConfigError, DominoError
from domino_spec.targets import default_device
from domino_spec.training import TrainConfig, open_world, prepare, train
from domino_spec.training.config import parse_assignments, read_settings


class _Lines:
    """One line of JSON a report."""

    def report(self, step: int, values: dict[str, Any]) -> None:
        shown = {k: round(v, 5) for k, v in values.items() if isinstance(v, (int, float))}
        print(json.dumps({"step": step, **shown}), flush=True)

    def close(self) -> None:
        pass


def main(arguments: list[str]) -> int:
    """Train as the file and the changes say; 128 + signal if a signal ended it."""
    resume = "--resume" in arguments
    arguments = [argument for argument in arguments if argument != "--resume"]
    if not arguments:
        raise ConfigError(
            "usage: python -m domino_spec.training run.yaml [name=value ...] [--resume]"
        )
    settings = {**read_settings(arguments[0]), **parse_assignments(arguments[1:])}
    config = TrainConfig.from_dict(settings)
    device = torch.device(config.device) if config.device else default_device()
    with open_world(device) as world:
        run = prepare(config, world=world, observers=[_Lines()], resume=resume, notice=print)
        outcome, drafter = train(run)
    if drafter is not None:
        print(f"the drafter is in {drafter}")
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DominoError as error:
        sys.exit(f"error: {error}")
