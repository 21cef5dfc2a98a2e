"""GGUF's blocks hold what gguf says, and products with them are the reference's to the last bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from domino_spec.errors import CheckpointError
from domino_spec.quantization import KINDS, QuantizedWeight, reference
from domino_spec.quantization.compiled import kernel

SHAPES = [(1, 32), (3, 64), (4, 96), (7, 160), (50, 256)]  # odd rows and blocks: every tail


def random_weight(rows: int, columns: int, kind: str, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    return QuantizedWeight.quantize(torch.randn(rows, columns, generator=generator), kind)


def random_x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0)
    )


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Without a compiler everything below would compare the reference with itself."""
    assert kernel() is not None


@pytest.mark.parametrize("kind", KINDS)
class TestBlocks:
    def test_values_are_those_of_gguf(self, kind):
        blocks = torch.randint(0, 256, (5, 3, reference.BYTES[kind]), dtype=torch.uint8)
        blocks[..., 1::2][..., :2] &= 0xBF  # scales are finite
        weight = QuantizedWeight(blocks, kind)
        expected = gguf_dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(weight.dequantize().numpy(), expected)
        rows = torch.tensor([[4, 0], [4, 2]])
        assert np.array_equal(weight.dequantize(rows).numpy(), expected[rows.numpy()])

    def test_rounding_is_that_of_gguf(self, kind):
        weight = random_x(40, 128)
        weight[0] = 0
        weight[1, :32] = torch.tensor([1.0, -1.0]).repeat(16)  # of equals the first counts
        weight[2, :32] = torch.tensor([-1.0, 1.0]).repeat(16)
        weight[3] = torch.arange(-64, 64) / 2  # halves
        expected = gguf_quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(
            QuantizedWeight.quantize(weight, kind).blocks.flatten(1).numpy(), expected
        )

    def test_rows_are_chosen_and_joined_without_rounding(self, kind):
        weight = random_weight(6, 64, kind)
        order = torch.tensor([3, 0, 5])
        assert torch.equal(weight[order].dequantize(), weight.dequantize()[order])
        assert torch.equal(weight[1:4].dequantize(), weight.dequantize()[1:4])
        joined = QuantizedWeight.cat([weight[:2], weight[2:]])
        assert torch.equal(joined.blocks, weight.blocks)
        assert joined.shape == (6, 64)
        assert joined.nbytes == 12 * reference.BYTES[kind]
        assert joined.device == torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
class TestLinear:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_reference_to_the_last_bit(self, kind, shape):
        weight = random_weight(*shape, kind)
        bias = random_x(shape[0])
        for m in (0, 1, 2, 3, 5, 8, 9, 19):
            x = random_x(m, shape[1])
            expected = reference.linear(weight.blocks, kind, x, None)
            assert same(weight.linear(x), expected)
            assert same(weight.linear(x, bias), expected + bias)

    def test_is_near_the_product_of_the_values(self, kind):
        weight = random_weight(64, 512, kind)
        x = random_x(7, 512)
        expected = x.double() @ weight.dequantize().double().T
        # each number of x is off by half a step at most; errors of many are independent
        step = x.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
        spread = (step.square().sum(-1, keepdim=True) / 12).sqrt() * weight.dequantize().unflatten(
            -1, (-1, 32)
        ).norm(dim=-1).amax()
        off = (weight.linear(x) - expected).abs()
        assert (off < 6 * spread).all()
        assert off.square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()

    def test_does_not_depend_on_what_else_is_asked(self, kind):
        """Rows alone and among others, one thread and more: the same bits."""
        weight = random_weight(260, 1024, kind)
        x = random_x(21, 1024)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            whole = weight.linear(x)
            for m in range(1, 21):
                assert torch.equal(weight.linear(x[:m]), whole[:m])
                assert torch.equal(weight.linear(x[m : m + 1]), whole[m : m + 1])
            torch.set_num_threads(3)
            assert torch.equal(weight.linear(x), whole)
            assert torch.equal(weight[5:200].linear(x), whole[:, 5:200])
        finally:
            torch.set_num_threads(before)

    def test_many_rows_and_long_ones(self, kind):
        """More rows than stay in a core's cache."""
        weight = random_weight(9, 4096, kind)
        x = random_x(45, 4096)
        assert torch.equal(weight.linear(x), reference.linear(weight.blocks, kind, x, None))

    def test_extremes(self, kind):
        weight = random_weight(5, 64, kind)
        weight.blocks[1, 0, :2] = torch.tensor([1, 0], dtype=torch.uint8)  # subnormal scale
        weight.blocks[2, 0, :2] = torch.tensor([1, 128], dtype=torch.uint8)
        if kind == "Q8_0":
            weight.blocks[3, :, 2:] = 128  # all -128
        x = random_x(8, 64)
        x[0] = 0
        x[1, 3] = torch.inf
        x[2, 40] = torch.nan
        x[3] = 1e-42
        x[4] *= 1e-36
        x[5] *= 1e36
        x[6] = 3.0
        x[7, :32] = torch.arange(-16, 16) + 0.5  # halves, after scaling or not
        found = weight.linear(x)
        assert same(found, reference.linear(weight.blocks, kind, x, None))
        assert (found[0] == 0).all()
        assert found[1:3].isnan().all()
        assert found[4:].isfinite().all()

    def test_shapes_and_types_of_x(self, kind):
        weight = random_weight(6, 64, kind)
        x = random_x(2, 3, 64)
        found = weight.linear(x)
        assert torch.equal(found.flatten(0, 1), weight.linear(x.flatten(0, 1)))
        assert torch.equal(weight.linear(x.transpose(0, 1)), found.transpose(0, 1))
        assert torch.equal(weight.linear(x[0, 0]), found[0, 0])
        half = weight.linear(x.bfloat16())
        assert same(half, weight.linear(x.bfloat16().float()).bfloat16())


def test_refusals():
    weight = random_weight(6, 64, "Q4_0")
    with pytest.raises(CheckpointError, match="expected one kind"):
        QuantizedWeight.cat([weight, random_weight(6, 64, "Q8_0")])
    with pytest.raises(CheckpointError, match="multiple of 32"):
        QuantizedWeight.quantize(torch.zeros(2, 48), "Q4_0")
    with pytest.raises(CheckpointError, match=r"expected torch.uint8 \[rows, columns // 32, 20\]"):
        QuantizedWeight(weight.blocks, "Q4_1")
    with pytest.raises(CheckpointError, match="found blocks of Q6_K"):
        QuantizedWeight(weight.blocks, "Q6_K")
    with pytest.raises(ValueError, match=r"expected \[..., 64\]"):
        weight.linear(torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"expected \[6\]"):
        weight.linear(torch.zeros(1, 64), torch.zeros(5))
