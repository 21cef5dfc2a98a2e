"""Packed weights multiply as plain ones do."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F

from domino_spec.engine.kernels import packing
from domino_spec.engine.kernels.packing import (
    SMALL,
    Packed,
    can_pack,
    packed,
    page_out,
    product,
)
from domino_spec.engine.models import load_model
from tests.support.families import make_target


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


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path):
    """Only those: of memory that is no file's nothing may be lost."""
    save_file({"weight": torch.arange(1 << 20).float()}, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        weights = [file.get_tensor("weight"), torch.arange(1 << 20).float()]
    for weight in weights:
        for part in (weight, weight[1:5], weight.view(1024, -1).T):
            page_out(part)
        weight[7] = -7.0  # a page of our own now
        page_out(weight)
        assert weight[7] == -7.0
        assert torch.equal(weight[8:], torch.arange(8, 1 << 20).float())


@pytest.mark.usefixtures("packing_small_weights")
def test_a_packed_model_leaves_its_module_as_it_was():
    """Joined projections would be a third copy of the weights."""
    if not can_pack(torch.float32):
        pytest.skip("this machine does not pack")
    target = make_target("llama")
    before = {name: each.data_ptr() for name, each in target.model.named_parameters()}
    model = load_model(target, slots=1, capacity=8, pack=True)
    assert isinstance(model.layers[0].qkv, Packed)
    assert {name: each.data_ptr() for name, each in target.model.named_parameters()} == before
