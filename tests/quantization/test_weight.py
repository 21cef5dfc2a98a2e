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
from domino_spec.quantization.rows import KeyRanges, attend, rms_norm, silu
from domino_spec.quantization.tiles import CHUNK, TILE

SHAPES = [(1, 32), (3, 64), (4, 96), (7, 160), (50, 256)]  # odd rows and blocks: every tail


def random_blocks(rows: int, columns: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Any bytes are blocks; scales are finite and of a like size."""
    form = reference.FORMATS[kind]
    size = (rows, max(columns // form.size, 1), form.bytes)
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    for place in [-2] if kind == "Q6_K" else [0, 2][: 1 + form.minimum]:
        blocks[..., place + 1] = 0x28 + 4 * (blocks[..., place + 1] & 1) + 128 * (place == 2)
    return blocks


def random_weight(rows: int, columns: int, kind: str, seed: int = 0) -> QuantizedWeight:
    """As many columns, or a block of the kind if that is more."""
    return QuantizedWeight.from_blocks(random_blocks(rows, columns, kind, seed), kind)


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


class TestBlocks:
    @pytest.mark.parametrize("kind", KINDS)
    def test_values_are_those_of_gguf(self, kind):
        for rows, columns in [(1, 32), (5, 96), (16, 256), (37, 512)]:
            blocks = random_blocks(rows, columns, kind)
            blocks[0, 0] = torch.arange(len(blocks[0, 0]))
            weight = QuantizedWeight.from_blocks(blocks, kind)
            expected = gguf_dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType[kind])
            assert np.array_equal(weight.dequantize().numpy(), expected)
            some = torch.tensor([[rows - 1, 0], [rows // 2, 0]])
            assert np.array_equal(weight.dequantize(some).numpy(), expected[some.numpy()])

    @pytest.mark.parametrize("kind", reference.ROUNDS)
    def test_rounding_is_that_of_gguf(self, kind):
        weight = random_x(40, 128)
        weight[0] = 0
        weight[1, :32] = torch.tensor([1.0, -1.0]).repeat(16)  # of equals the first counts
        weight[2, :32] = torch.tensor([-1.0, 1.0]).repeat(16)
        weight[3] = torch.arange(-64, 64) / 2  # halves
        expected = gguf_quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(reference.quantize(weight, kind).flatten(1).numpy(), expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_are_chosen_and_joined_without_rounding(self, kind):
        weight = random_weight(38, 64, kind)
        values = weight.dequantize()
        order = torch.tensor([33, 0, 5])
        assert torch.equal(weight[order].dequantize(), values[order])
        for rows in (slice(1, 4), slice(16, 32), slice(16, 38), slice(5, 33, 4)):
            assert torch.equal(weight[rows].dequantize(), values[rows])
        assert weight[16:].tiles.data_ptr() == weight.tiles[1:].data_ptr()  # whole tiles: a view
        for at in (2, 16):
            joined = QuantizedWeight.cat([weight[:at], weight[at:]])
            assert torch.equal(joined.tiles, weight.tiles)
            assert joined.shape == weight.shape

    def test_many_rows_are_read_some_at_a_time(self, monkeypatch):
        """A row comes with its tile: all at once they would be sixteen times what is chosen."""
        weight = random_weight(700, 64, "Q8_0")
        order = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:555]
        read, own = [], QuantizedWeight.unpack
        monkeypatch.setattr(
            QuantizedWeight, "unpack", lambda self, rows: read.append(len(rows)) or own(self, rows)
        )
        chosen = weight[order]
        monkeypatch.undo()
        assert torch.equal(chosen.dequantize(), weight.dequantize()[order])
        assert sum(read) == 555
        assert max(read) * TILE * 64 <= CHUNK

    def test_many_rows_are_rounded_as_alone(self):
        weight = random_x(300, CHUNK // 1024)
        found = QuantizedWeight.quantize(weight, "Q8_0")
        for row in (0, 15, 16, 299):
            alone = QuantizedWeight.quantize(weight[row : row + 1], "Q8_0")
            assert torch.equal(found.dequantize()[row], alone.dequantize()[0])


@pytest.mark.parametrize("kind", KINDS)
class TestLinear:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_reference_to_the_last_bit(self, kind, shape):
        weight = random_weight(*shape, kind)
        for m in (0, 1, 2, 3, 5, 8, 9, 19):
            x = random_x(m, weight.shape[1])
            expected = reference.linear(weight.unpack(), kind, x)
            assert same(weight.linear(x), expected)

    def test_takes_norm_bias_residual_and_gate_along(self, kind):
        weight = random_weight(38, 512, kind)
        x, bias, norm, residual = random_x(5, 512), random_x(38), random_x(512), random_x(5, 38)
        normed = rms_norm(x, norm, 1e-5)
        expected = weight.linear(normed) + bias
        assert same(weight.linear(x, bias, norm=norm, eps=1e-5), expected)
        assert same(weight.linear(normed, bias, residual=residual), residual + expected)
        gate, up = expected.chunk(2, dim=-1)
        gated = silu(gate.contiguous()) * up
        assert same(weight.linear(normed, bias, gated=True), gated)
        half = residual[:, :19].contiguous()
        assert same(weight.linear(normed, bias, gated=True, residual=half), half + gated)

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
            assert torch.equal(weight[16:200].linear(x), whole[:, 16:200])
        finally:
            torch.set_num_threads(before)

    def test_many_rows_and_long_ones(self, kind):
        """More rows than stay in a core's cache."""
        weight = random_weight(9, 4096, kind)
        x = random_x(45, 4096)
        assert torch.equal(weight.linear(x), reference.linear(weight.unpack(), kind, x))

    def test_extremes(self, kind):
        blocks = random_blocks(5, 64, kind)
        place = -2 if kind == "Q6_K" else 0
        blocks[1, 0, place : place + 2 or None] = torch.tensor(
            [1, 0], dtype=torch.uint8
        )  # subnormal
        blocks[2, 0, place : place + 2 or None] = torch.tensor([1, 128], dtype=torch.uint8)
        blocks[3, :, 16:128] = 128  # of 8 bits all -128
        blocks[4, :, 16:128] = 255
        weight = QuantizedWeight.from_blocks(blocks, kind)
        x = random_x(8, weight.shape[1])
        x[0] = 0
        x[1, 3] = torch.inf
        x[2, -1] = torch.nan
        x[3] = 1e-42
        x[4] *= 1e-36
        x[5] *= 1e31
        x[6] = 3.0
        x[7, :32] = torch.arange(-16, 16) + 0.5  # halves, after scaling or not
        found = weight.linear(x)
        assert same(found, reference.linear(weight.unpack(), kind, x))
        assert (found[0] == 0).all()
        assert found[1:3].isnan().all()
        assert found[4:].isfinite().all()

    def test_shapes_and_types_of_x(self, kind):
        weight = random_weight(6, 256, kind)
        x = random_x(2, 3, 256)
        found = weight.linear(x)
        assert torch.equal(found.flatten(0, 1), weight.linear(x.flatten(0, 1)))
        assert torch.equal(weight.linear(x.transpose(0, 1)), found.transpose(0, 1))
        assert torch.equal(weight.linear(x[0, 0]), found[0, 0])
        half = weight.linear(x.bfloat16())
        assert same(half, weight.linear(x.bfloat16().float()).bfloat16())


class TestRows:
    def test_norms_are_the_references_alone_and_among_others(self):
        x, weight = random_x(6, 77), random_x(77)
        found = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-6))
        assert torch.equal(rms_norm(x[2:3], weight, 1e-6), found[2:3])

    def test_silu_is_the_references_from_end_to_end(self):
        x = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([-torch.inf, torch.inf])])
        found = silu(x)
        expected = reference.silu(x.double())
        finite = expected.isfinite()
        torch.testing.assert_close(
            found[finite].double(), expected[finite], rtol=3e-7, atol=1e-36, equal_nan=True
        )
        assert found[-1] == torch.inf
        assert silu(torch.tensor([torch.nan])).isnan().all()

    @pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (3, 3, 20)])
    def test_attention_is_the_references_alone_and_among_others(self, heads, kv_heads, size):
        draw = torch.Generator().manual_seed(4)
        keys, values = torch.randn(2, 3, kv_heads, 90, size, generator=draw).unbind()
        query = torch.randn(5, heads, size, generator=draw)
        spans = [(0, 0, 1), (2, 3, 70), (1, 0, 16), (1, 0, 0), (2, 0, 40)]
        extras = [[], [], [20, 22, 31], [7, 5], list(range(40, 70))]
        found = attend(query, keys, values, KeyRanges.of(spans, extras), 0.3)
        seen = KeyRanges.of(spans, extras)
        expected = reference.attend(query, keys, values, seen.spans, seen.extras, 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for token in range(5):
            alone = KeyRanges.of([spans[token]], [extras[token]])
            assert torch.equal(attend(query[[token]], keys, values, alone, 0.3)[0], found[token])
        whole = KeyRanges.of([(2, 0, 70)])  # the same places as a stretch: the same bits
        assert torch.equal(attend(query[[4]], keys, values, whole, 0.3)[0], found[4])


def test_refusals():
    weight = random_weight(6, 64, "Q4_0")
    with pytest.raises(CheckpointError, match="expected one kind"):
        QuantizedWeight.cat([weight, random_weight(6, 64, "Q8_0")])
    with pytest.raises(CheckpointError, match="multiple of 32"):
        QuantizedWeight.quantize(torch.zeros(2, 48), "Q4_0")
    with pytest.raises(CheckpointError, match="found Q6_K, expected one of Q4_0, Q4_1, Q8_0"):
        QuantizedWeight.quantize(torch.zeros(2, 256), "Q6_K")
    blocks = random_blocks(6, 64, "Q4_0")
    with pytest.raises(CheckpointError, match=r"expected torch.uint8 \[rows, columns // 32, 20\]"):
        QuantizedWeight.from_blocks(blocks, "Q4_1")
    with pytest.raises(CheckpointError, match="found blocks of Q2_K"):
        QuantizedWeight.from_blocks(blocks, "Q2_K")
    with pytest.raises(ValueError, match=r"expected \[..., 64\]"):
        weight.linear(torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"expected \[6\]"):
        weight.linear(torch.zeros(1, 64), torch.zeros(5))
