"""How a product of few rows is cut up among programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_ROWS = 16
"""Above this the vendor's library did better on an H200, before products were launched early."""


def takes(rows: int) -> bool:
    """Whether so many rows are few."""
    return 1 <= rows <= MOST_ROWS


def padded(rows: int) -> int:
    """Rows of a program's tile."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


@dataclass(frozen=True)
class Plan:
    """How one shape is cut up."""

    rows: int  # of x a program takes: 16, 32 or 64
    columns: int  # of the result a program owns
    depth: int  # of K, a step of the pipeline
    stages: int  # steps on their way at a time
    split: int  # programs that share K


def plan(m: int, n: int, k: int, *, gated: bool, dtype: torch.dtype) -> Plan:
    """A rule through what was fastest on an H200 (132 processors; 16 rows, bfloat16).

    Wide results (from N = 6144) do best with 64 rows of the weight a program and no sharing of K:
    96 programs with six steps on their way, or several programs a processor with fewer steps each.
    Narrow ones share K among up to four programs, about two a processor.
    """
    wide = n >= 6144
    owned = 64 if wide or (n >= 4096 and k >= 8192) else 32 if n >= 2048 else 16
    depth = 128
    if dtype == torch.float32:  # no tensor cores: smaller tiles, for the registers' sake
        owned, depth = min(owned, 32), 32
    columns = max(16, owned // 2) if gated else owned
    programs = -(-(n // 2 if gated else n) // columns)
    split = 1
    while not wide and programs * split < 192 and split < 4 and k // (2 * split) >= 8 * depth:
        split *= 2
    stages = 3 if gated else 4 if split > 1 or programs >= 264 else 6
    return Plan(padded(m), columns, depth, stages, split)
