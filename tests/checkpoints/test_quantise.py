from __future__ import annotations

import pytest
import torch

from domino_spec.checkpoints import quantise as q
from domino_spec.checkpoints.packing import packed_columns
from domino_spec.errors import CheckpointError

BITS = pytest.mark.parametrize("bits", [8, 6, 4])


def matrix(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


@BITS
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 63, 64, 130])
def test_every_code_survives_packing(bits: int, columns: int) -> None:
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(lowest, highest + 1, (50, columns), generator=generator)
    codes[0, 0], codes[1, -1] = lowest, highest
    packed = q.pack(codes.to(torch.int8), bits)
    assert packed.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert packed.shape == (50, packed_columns(columns, bits))
    unpacked = q.unpack(packed, bits=bits, columns=columns)
    assert unpacked.dtype == torch.int8
    assert unpacked.tolist() == codes.tolist()


def test_the_bytes_are_what_the_bits_promise() -> None:
    assert [packed_columns(64, bits) for bits in (8, 6, 4)] == [64, 48, 32]
    assert q.pack(torch.tensor([[-8, 7, 1]], dtype=torch.int8), 4).tolist() == [[0xF0, 0x89]]
    six = q.pack(torch.tensor([[-32, 31, 0, 1]], dtype=torch.int8), 6)
    number = int.from_bytes(bytes(six[0].tolist()), "little")
    assert [number >> shift & 63 for shift in (0, 6, 12, 18)] == [0, 63, 32, 33]


@BITS
@pytest.mark.parametrize("columns", [64, 100, 7])
def test_the_error_is_that_of_the_bits(bits: int, columns: int) -> None:
    weight = matrix(40, columns)
    codes, scales = q.quantise(weight, bits=bits, group_size=64)
    assert codes.shape == weight.shape
    assert scales.shape == (40, -(-columns // 64))
    found = q.dequantise(codes, scales, group_size=64).float()
    step = weight.abs().amax() / ((1 << (bits - 1)) - 1)
    error = (found - weight).square().mean().sqrt()
    assert error < 0.35 * step  # a uniform error of half a step each way is 0.29 of it


@BITS
def test_clipping_is_better_than_none_and_never_worse(bits: int) -> None:
    weight = matrix(200, 64)
    weight[:, 0] *= 4  # an outlier in each group
    codes, scales = q.quantise(weight, bits=bits, group_size=64)
    error = (codes.float() * scales.float() - weight).square().sum(1)
    highest = (1 << (bits - 1)) - 1
    plain_scale = (weight.abs().amax(1, keepdim=True) / highest).half().float()
    plain = (weight / plain_scale).round().clamp(-highest - 1, highest) * plain_scale
    plain_error = (plain - weight).square().sum(1)
    assert bool((error <= plain_error).all())
    assert error.sum() < 0.97 * plain_error.sum()


def test_each_group_has_its_own_scale() -> None:
    weight = torch.cat((matrix(3, 32), matrix(3, 32, seed=1) * 100), dim=1)
    codes, scales = q.quantise(weight, bits=8, group_size=32)
    found = q.dequantise(codes, scales, group_size=32).float()
    assert (found - weight)[:, :32].abs().max() < 0.001
    assert bool((scales[:, 1].abs() > 20 * scales[:, 0].abs()).all())


def test_zeros_and_tiny_values_stay_near_zero() -> None:
    weight = torch.zeros(2, 10)
    weight[1] = 1e-9
    codes, scales = q.quantise(weight, bits=4, group_size=4)
    found = q.dequantise(codes, scales, group_size=4)
    assert found[0].tolist() == [0.0] * 10
    assert found[1].abs().max() <= 1e-6


def test_unpacked_values_are_rounded_to_bfloat16_once() -> None:
    codes = torch.tensor([[127, -3]], dtype=torch.int8)
    scales = torch.tensor([[0.0123]]).half()
    exact = codes.double() * scales.double()
    found = q.dequantise(codes, scales, group_size=2)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.to(torch.bfloat16))


def test_large_matrices_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(13, 20)
    whole = q.quantise(weight, bits=6, group_size=8)
    monkeypatch.setattr(q, "_AT_ONCE", 45)
    parts = q.quantise(weight, bits=6, group_size=8)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e6])
def test_broken_weights_are_refused(value: float) -> None:
    weight = matrix(2, 4)
    weight[1, 2] = value
    with pytest.raises(CheckpointError, match="not finite or beyond float16"):
        q.quantise(weight, bits=8, group_size=4)
