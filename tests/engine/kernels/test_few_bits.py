"""Products with weights of few bits: our kernel for few rows, and dequantised for many."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from domino_spec.engine.kernels import few_rows, packing
from domino_spec.engine.kernels.dequantize import dequantized
from domino_spec.engine.kernels.linear import linear, linear_then_norm
from domino_spec.engine.kernels.packing import Parts
from domino_spec.engine.kernels.runtime import Gpu, absent
from domino_spec.quantization import ScaledWeight
from domino_spec.quantization.scaled import pack_int4, paired
from tests.engine.kernels.launches import scaled as scaled_on_meta
from tests.engine.kernels.offline import ROOM, needs
from tests.engine.kernels.test_linear import EPS, compile_case, error, exact, fed, tensors


def scaled(weight: Tensor, form: str) -> ScaledWeight:
    """A weight rounded to one of the forms that checkpoints have."""
    if form in ("int8", "int4", "fp8"):
        return ScaledWeight.quantize(weight, form)
    rows, columns = weight.shape
    if form == "blocks":  # fp8 in blocks of 128 x 128, the last of them partial
        scales = torch.rand(-(-columns // 128), -(-rows // 128), device=weight.device) + 0.5
        values = (weight * 8).to(torch.float8_e4m3fn)
        return ScaledWeight("fp8", values, scales, group=128, row_block=128)
    group = int(form.partition(" of ")[2])
    draw = torch.Generator().manual_seed(rows)
    scales = torch.rand(columns // group, rows, generator=draw).to(weight.device) / 8 + 0.01
    zeros = torch.randint(0, 16, scales.shape, generator=draw).to(weight.device)
    words = paired(scales.half(), zeros)
    if form.startswith("int8"):
        values = (weight * columns**0.5 * 40).clamp(-128, 127).to(torch.int8)
        return ScaledWeight("int8", values, words, group=group, pairs=torch.float16)
    numbers = torch.randint(0, 16, (rows, columns), generator=draw, dtype=torch.uint8)
    packed = pack_int4(numbers.to(weight.device))
    return ScaledWeight("int4", packed, words, group=group, pairs=torch.float16)


CASES = [  # form, rows, N, K, gated, extras
    ("int8", (5, 40, 200, False), ("norm", "bias", "residual")),
    ("int8", (3, 64, 224, True), ("norm",)),
    ("int8 of 64", (4, 24, 2112, False), ("residual",)),
    ("int4", (13, 20, 640, False), ("residual",)),
    ("int4 of 32", (5, 40, 160, False), ("norm", "bias")),
    ("int4 of 64", (40, 64, 192, True), ("norm",)),
    ("fp8", (2, 24, 672, True), ("norm", "bias")),
    ("blocks", (6, 300, 200, False), ("norm",)),
    ("blocks", (20, 256, 300, True), ("norm",)),
    # On the left of the product: a tile of eight rows, two of eight, and programs that share K.
    ("int8", (3, 2112, 96, True), ("norm",)),
    ("fp8", (13, 4160, 96, True), ("norm",)),
    ("fp8", (7, 2080, 1200, False), ("bias", "residual")),
]


@pytest.mark.parametrize(("form", "shape", "extras"), CASES, ids=str)
def test_few_rows_are_the_formula(form, shape, extras, device):
    """With the values that the weight stands for, and no rounding of them in between."""
    dtypes = [torch.float32, torch.bfloat16]
    # For tall tiles, for programs that share K, and where the interpreter takes long.
    if shape[0] > 16 or shape[1] > 4096 or shape[2] > 1000:
        dtypes = [torch.bfloat16]
    for dtype in dtypes + [torch.float16] * (form == "int4 of 32"):
        drawn = tensors(shape, dtype, device)
        given = {name: drawn[name] for name in ("x", "weight", *extras)}
        weight = scaled(given["weight"].float(), form)
        truth = exact({**given, "weight": weight.dequantize()}, shape[3])
        run = {**fed(given), "weight": weight, "gated": shape[3]}
        limit = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        found = linear(**run)
        assert found.dtype == dtype
        assert error(found, truth).max() < limit


def test_the_numbers_are_read_by_the_kernel(monkeypatch, device):
    """And none by way of a dequantised weight, up to the rows that count as few."""
    weight = scaled(torch.ones(32, 128, device=device), "int4")
    launches, own = [], few_rows.launch
    monkeypatch.setattr(few_rows, "launch", lambda *a, **b: launches.append(a[3]) or own(*a, **b))
    for rows, dtype in ((1, torch.float32), (16, torch.float16), (192, torch.bfloat16)):
        linear(torch.ones(rows, 128, device=device, dtype=dtype), weight)
    assert launches == [weight] * 3
    linear(torch.ones(300, 128, device=device, dtype=torch.bfloat16), weight)
    assert len(launches) == 3


@pytest.mark.parametrize("form", ["int8", "int8 of 64", "int4", "int4 of 32", "fp8", "blocks"])
def test_many_rows_read_a_dequantised_weight(form, device):
    weight = scaled(tensors((1, 70, 192, False), torch.float32, device)["weight"], form)
    assert torch.equal(dequantized(weight, torch.float32), weight.dequantize())
    assert torch.equal(dequantized(weight, torch.bfloat16), weight.dequantize().bfloat16())
    x = torch.randn(300, 192, device=device).bfloat16()
    torch.testing.assert_close(linear(x, weight), weight.linear(x))


def test_a_row_among_others_is_what_it_is_alone_to_the_last_bit(device):
    for form, width in (("int4", 96), ("blocks", 96), ("fp8", 2112)):
        drawn = tensors((9, width, 256, False), torch.bfloat16, device)
        weight = scaled(drawn["weight"].float(), form)
        norm = torch.ones(width, device=device, dtype=torch.bfloat16)
        together = linear_then_norm(drawn["x"], weight, norm, EPS)
        for row in (0, 8):
            alone = linear_then_norm(drawn["x"][row : row + 1], weight, norm, EPS)
            assert torch.equal(alone.rows[0], together.rows[row])
            assert torch.equal(alone.weighted[0], together.weighted[row])


@pytest.mark.compiled
def test_more_forms_compile_for_the_h200():
    """Those of test_sm90 aside."""
    gate_up, down, qkv = (24576, 4096), (4096, 12288), (6144, 4096)
    half, brain = torch.float16, torch.bfloat16
    make = scaled_on_meta
    forms = {
        (gate_up, "norm gated", brain, 64): scaled_on_meta(
            "int4", *gate_up, group=128, pairs=brain
        ),
        (down, "residual then", half, 16): make("int4", *down, group=32, pairs=half),
        (qkv, "norm bias", brain, 16): make("int8", *qkv),
        (gate_up, "norm gated", brain, 1): make("int8", *gate_up),
        (down, "residual then", half, 8): make("fp8", *down),
    }
    cases = [
        compile_case(*shape, extras, dtype, rows=rows, scaled=weight)
        for (shape, extras, dtype, rows), weight in forms.items()
    ]
    for case, found in zip(cases, needs(cases), strict=True):
        assert found.shared <= ROOM[90], case
        assert found.spills == 0, case


def test_more_rows_count_as_few_than_of_a_plain_weight():
    """Up to three tiles, whatever the weight's size: dequantised it would be read oftener."""
    plain = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")
    few = scaled_on_meta("fp8", 24576, 4096)
    for weight, most in ((plain, 64), (few, 192)):
        assert few_rows.takes(most, torch.bfloat16, weight)
        assert not few_rows.takes(most + 1, torch.bfloat16, weight)


def test_parts_of_several_forms_are_each_read_by_the_kernel(monkeypatch, device):
    """As of a checkpoint that leaves one of the joined projections plain."""
    drawn = tensors((3, 96, 96, False), torch.float32, device)
    plain, few = drawn["weight"].split((32, 64))
    weight = scaled(few, "int4")
    whole = torch.cat((plain, weight.dequantize()))
    given = {name: drawn[name] for name in ("x", "norm", "bias")}
    monkeypatch.setattr(packing, "product", None)
    found = linear(**fed({**given, "weight": Parts([plain, weight])}))
    assert error(found, exact({**given, "weight": whole}, False)).max() < 2e-5


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (2560, 9728), (1536, 8960), (576, 1536)])
@pytest.mark.parametrize("group", [None, 128, 32])
def test_a_step_lies_within_a_group_and_long_ones_are_whole(n, k, group):
    weight = scaled_on_meta("int8", n, k, group=group)
    cut = few_rows.plan(n, k, gated=False, dtype=torch.bfloat16, scaled=weight)
    assert (group or k) % cut.depth == 0
    assert cut.depth <= 128 or k % (cut.depth * cut.split) == 0


def test_the_weight_is_on_the_left_where_that_was_measured_to_be_faster():
    rows = {"gated": False, "dtype": torch.bfloat16}
    eight, older = scaled_on_meta("fp8", 4096, 4096), Gpu((8, 9), absent.shared_memory)
    found = [few_rows.plan(4096, 4096, **rows, rows=m, scaled=eight) for m in (1, 8, 9, 16)]
    assert [(cut.rows, cut.swapped) for cut in found] == [(8, True)] * 2 + [(16, True)] * 2
    assert len({replace(cut, rows=16) for cut in found}) == 1, "a row's bits are the same in all"
    others = [
        few_rows.plan(4096, 4096, **rows, scaled=eight, on=older),
        few_rows.plan(4096, 4096, **rows, scaled=eight, rows=17),
        few_rows.plan(4096, 4096, **rows, scaled=scaled_on_meta("int4", 4096, 4096)),
        few_rows.plan(4096, 4096, **rows, scaled=scaled_on_meta("fp8", 4096, 4096, group=128)),
        few_rows.plan(4096, 4096, **rows),
    ]
    assert not any(cut.swapped for cut in others)
