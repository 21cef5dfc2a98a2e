"""Products with weights of few bits on a GPU: seconds over the bytes' floor, by plan.

python -m benchmarks.few_bits --kinds fp8 int8 --rows 1 16 --out few_bits.jsonl

Each product of a layer of Qwen3-8B's shape, of so many weights in turn that none is found in a
cache. Without --sweep by the plan that the engine takes, with it by others around that.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from domino_spec.engine.kernels import few_rows, runtime
from domino_spec.engine.kernels.few_rows import Plan, plan
from domino_spec.engine.measure import bandwidth, seconds_of
from domino_spec.quantization import SCALED_KINDS, ScaledWeight
from domino_spec.records import append_record, environment

PRODUCTS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}
"""Rows and columns of the weights; gate_up is gated."""
_CACHES = 400 << 20
"""Bytes of weights in turn: several times the second-level cache."""

Form = Tensor | ScaledWeight


def main() -> None:
    """One record for each product, form, number of rows and plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument("--kinds", nargs="+", default=["plain", *SCALED_KINDS, "blocks"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device("cuda")
    speed = bandwidth(device)
    for name, kind in itertools.product(given.products, given.kinds):
        n, k = PRODUCTS[name]
        one = weight_of(kind, n, k, device)
        weights = [one, *(weight_of(kind, n, k, device) for _ in range(_CACHES // one.nbytes))]
        for rows in given.rows:
            for cut in plans(name, one, rows, device, sweep=given.sweep):
                seconds = timed(weights, rows, cut, gated=name == "gate_up")
                if seconds is None:
                    continue  # more shared memory than there is
                over = seconds * speed / one.nbytes
                print(f"{name:8} {kind:6} {rows:3} rows {over:5.2f} x floor  {cut}", flush=True)
                record: dict[str, Any] = {
                    "product": name, "kind": kind, "rows": rows, "plan": asdict(cut),
                    "seconds": seconds, "bytes": one.nbytes, "bandwidth": speed,
                    "environment": environment(),
                }  # fmt: skip
                append_record(given.out, record)


def weight_of(kind: str, n: int, k: int, device: torch.device) -> Form:
    """A random weight; blocks are fp8 ones of 128 x 128."""
    plain = torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5
    if kind == "plain":
        return plain
    if kind in SCALED_KINDS:
        return ScaledWeight.quantize(plain, kind)
    scales = torch.rand(-(-k // 128), -(-n // 128), device=device) / 8
    return ScaledWeight("fp8", plain.to(torch.float8_e4m3fn), scales, group=128, row_block=128)


def plans(
    name: str, weight: Form, rows: int, device: torch.device, *, sweep: bool
) -> Iterator[Plan]:
    """The engine's plan, and others around it."""
    scaled = weight if isinstance(weight, ScaledWeight) else None
    group = None if scaled is None else scaled.group
    own = plan(
        weight.shape[0], weight.shape[1], gated=name == "gate_up", dtype=torch.bfloat16,
        rows=rows, scaled=scaled, on=runtime.gpu(device),
    )  # fmt: skip
    yield own
    if not sweep:
        return
    depths = (64, 128) if group == 128 else (64, 128, 256)
    for columns, depth, stages, split in itertools.product(
        (16, 32, 64), depths, (3, 4, 5, 6, 8), (1, 2, 4)
    ):
        other = replace(own, columns=columns, depth=depth, stages=stages, split=split)
        if other != own and weight.shape[1] % (depth * split) == 0:
            yield other


def timed(weights: list[Form], rows: int, cut: Plan, *, gated: bool) -> float | None:
    """Seconds of one product by this plan; None where it does not fit."""
    from triton.runtime.errors import OutOfResources

    device = weights[0].device
    x = torch.randn(rows, weights[0].shape[1], device=device, dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            few_rows.launch(x, None, 0.0, weight, gated=gated)

    with mock.patch.object(few_rows, "plan", return_value=cut):
        try:
            return seconds_of(run, device) / len(weights)
        except OutOfResources:
            return None


if __name__ == "__main__":
    main()
