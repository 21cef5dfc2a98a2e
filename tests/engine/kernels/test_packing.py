"""Packed weights multiply as plain ones do."""

import pytest
import torch
from torch.nn import functional as F

from domino_spec.engine.kernels import packing
from domino_spec.engine.kernels.packing import SMALL, Packed, can_pack, packed, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_same(dtype, rows, bias):
    if not can_pack(dtype):
        pytest.skip(f"this machine does not pack {dtype}")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 36, generator=generator).to(dtype)
    x = torch.randn(rows, 36, generator=generator).to(dtype)
    added = torch.randn(70, generator=generator).to(dtype) if bias else None
    found = product(x, Packed(weight), added)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=tolerance)
    assert found.dtype == dtype


def test_a_packed_weight_is_not_packed_again():
    if not can_pack(torch.float32):
        pytest.skip("this machine does not pack")
    once = packed(torch.ones(SMALL + 1, 1))
    assert isinstance(once, Packed)
    assert packed(once) is once
    assert once.nbytes == 4 * (SMALL + 1)


def test_a_small_weight_is_not_packed():
    weight = torch.ones(SMALL, 1)
    assert packed(weight) is weight


@pytest.mark.usefixtures("packing_small_weights")
def test_where_nothing_can_be_packed_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(packing, "_able", {torch.float32: False})
    weight = torch.ones(4, 4)
    assert packed(weight) is weight
    assert torch.equal(product(torch.ones(1, 4), weight, None), torch.full((1, 4), 4.0))


def test_a_machine_that_multiplies_wrongly_is_found_out(monkeypatch):
    monkeypatch.setattr(packing, "_able", {})
    monkeypatch.setattr(Packed, "product", lambda self, x, bias: torch.zeros(len(x), 48))
    assert not can_pack(torch.float32)
