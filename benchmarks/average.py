"""Averages the weights of two drafters of one shape, such as a warm start and its start.

    python -m benchmarks.average TRAINED START OUT --share 0.4

A warm start whose curriculum ended early drafts best with its head and forgets how to draft
without: candidates picked by its base logits then miss. Some of its start brings them back.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from domino_spec.checkpoints import load_drafter, save_drafter


def main() -> None:
    """Write (1 - share) × TRAINED + share × START in bfloat16, with TRAINED's log and settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of START")
    arguments = parser.parse_args()
    trained = load_drafter(arguments.trained, dtype=torch.float32).drafter
    start = load_drafter(arguments.start, dtype=torch.float32).drafter
    if trained.config.to_dict() != start.config.to_dict():
        raise SystemExit(f"{arguments.trained} and {arguments.start} have different shapes.")
    with torch.no_grad():
        for mine, other in zip(trained.parameters(), start.parameters(), strict=True):
            mine.lerp_(other, arguments.share)
    save_drafter(trained, arguments.out, dtype=torch.bfloat16)
    for name in ("config.yaml", "log.jsonl"):
        if (arguments.trained / name).exists():
            shutil.copyfile(arguments.trained / name, arguments.out / name)


if __name__ == "__main__":
    main()
