import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from domino_spec.engine.kernels import few_rows, pointwise
from domino_spec.engine.kernels.few_rows import plan, takes
from domino_spec.engine.kernels.linear import (
    Normed,
    add_normed,
    embedded,
    linear,
    linear_reference,
    linear_then_norm,
    normed,
)
from domino_spec.engine.kernels.packing import ScaledEmbedding
from domino_spec.quantization import ScaledWeight
from tests.engine.kernels.offline import ROOM, Case, needs

EPS = 1e-6
SHAPES = [  # rows, N, K, gated: whole and ragged tiles, one and several parts
    (1, 32, 256, False),
    (5, 40, 200, False),
    (13, 20, 2200, False),
    (70, 40, 2200, False),
    (3, 96, 200, True),
    (2, 40, 4296, True),
    (16, 64, 128, True),
    (40, 32, 128, True),
]
EXTRAS = [(), ("norm",), ("norm", "bias", "residual"), ("residual",), ("bias",)]
CASES = [(shape, EXTRAS[at % 5]) for at, shape in enumerate(SHAPES)]
CASES += [(shape, EXTRAS[(at + 2) % 5]) for at, shape in enumerate(SHAPES)]
"""Every shape twice, every extra three times."""


def tensors(
    shape: tuple[int, int, int, bool], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Rows of very different sizes, as hidden states have."""
    m, n, k, gated = shape
    make = torch.Generator().manual_seed(m + n + k)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=make)

    made = {
        "x": normal(m, k) * torch.logspace(-1, 2, m)[:, None],
        "weight": normal(n, k) / k**0.5,
        "norm": 1 + normal(k) / 4,
        "bias": normal(n),
        "residual": normal(m, n // 2 if gated else n),
    }
    return {name: value.to(device, dtype) for name, value in made.items()}


def fed(given: dict[str, Tensor]) -> dict[str, Tensor | Normed]:
    """With the norm taken into x, as callers do."""
    rest = {name: value for name, value in given.items() if name not in ("x", "norm")}
    x = given["x"]
    return {"x": normed(x, given["norm"], EPS) if "norm" in given else x, **rest}


def exact(given: dict[str, Tensor], gated: bool) -> Tensor:
    """The formula in float64."""
    wide = {name: value.double() for name, value in given.items()}
    x = wide["x"]
    if "norm" in wide:
        x = x / (x.pow(2).mean(dim=1, keepdim=True) + EPS).sqrt() * wide["norm"]
    result = x @ wide["weight"].T + wide.get("bias", 0.0)
    if gated:
        gate, up = result.chunk(2, dim=1)
        result = gate * torch.sigmoid(gate) * up
    return result + wide.get("residual", 0.0)


def error(result: Tensor, truth: Tensor) -> Tensor:
    """Of each row, relative to its size."""
    return (result.double() - truth).norm(dim=1) / truth.norm(dim=1)


@pytest.mark.parametrize(("shape", "extras"), CASES, ids=str)
def test_float32_is_the_formula(
    shape: tuple[int, int, int, bool], extras: tuple[str, ...], device: torch.device
) -> None:
    drawn = tensors(shape, torch.float32, device)
    given = {name: drawn[name] for name in ("x", "weight", *extras)}
    truth = exact(given, shape[3])
    for run in (linear, linear_reference):
        assert error(run(**fed(given), gated=shape[3]), truth).max() < 1e-5


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("shape", "extras"), CASES[1::2], ids=str)
def test_half_precision_is_the_formula_rounded(
    shape: tuple[int, int, int, bool],
    extras: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Both round what the product sees, its sums and what follows: five times at most.

    Each rounding is off by eps / 2 at most, and by less on average: 2 eps for a row in all.
    """
    drawn = tensors(shape, dtype, device)
    given = {name: drawn[name] for name in ("x", "weight", *extras)}
    result = linear(**fed(given), gated=shape[3])
    reference = linear_reference(**fed(given), gated=shape[3])
    truth = exact(given, shape[3])
    assert result.dtype == dtype
    for mine in (result, reference):
        assert error(mine, truth).max() < 2 * torch.finfo(dtype).eps
    if "norm" not in extras:  # the same roundings of sums added up in another order
        unequal = (result != reference).float().mean()
        assert unequal < 0.05
        torch.testing.assert_close(result, reference, rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 96, 200, True), (40, 64, 128, True)], ids=str)
def test_a_gate_may_be_gelu(shape: tuple[int, int, int, bool], device: torch.device) -> None:
    """By few rows' kernel, by that of many, and by PyTorch."""
    drawn = tensors(shape, torch.float32, device)
    x, weight = drawn["x"], drawn["weight"]
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    truth = F.gelu(gate, approximate="tanh") * up
    for run in (linear, linear_reference):
        assert error(run(x, weight, gated=True, activation=pointwise.GELU_TANH), truth).max() < 1e-5


def test_norms_of_half_precision_may_have_weights_in_float32(device: torch.device) -> None:
    """Gemma's, which are one and a little."""
    drawn = tensors((40, 96, 64, False), torch.bfloat16, device)
    norm = 1 + torch.arange(64, device=device) / 4096
    truth = exact(
        {**drawn, "norm": norm, "bias": torch.zeros(()), "residual": torch.zeros(())}, False
    )
    for rows in (3, 40):
        x = drawn["x"][:rows]
        for found in (
            linear(normed(x, norm, EPS), drawn["weight"]),
            F.linear(pointwise.torch_rms_norm(x, norm, EPS), drawn["weight"]),
        ):
            assert found.dtype == torch.bfloat16
            assert error(found, truth[:rows]).max() < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(3, torch.float32), (16, torch.bfloat16), (20, torch.float32), (5, torch.float16)],
    ids=str,
)
def test_a_normed_sum_is_what_its_parts_are(
    count: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Norm, residual and the next norm's weights, wherever the rows lie."""
    drawn = tensors((count, 8, 72, False), dtype, device)
    x, inner, residual = drawn["x"], drawn["norm"], drawn["x"].flip(0)
    norm = 1 + torch.arange(72, device=device) / 64
    wide = x.new_zeros(count, 3, 72)
    made = add_normed(x, inner, residual, norm, EPS, out=wide[:, 1])
    rows = residual + pointwise.rms_norm(x, inner, EPS)
    if device.type == "cpu":
        assert torch.equal(made.rows, rows)
    else:  # a product and a sum are rounded once, in PyTorch's operations twice
        twice = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(made.rows, rows, rtol=twice, atol=twice)
        rows = made.rows
    assert torch.equal(wide[:, 1], rows)
    assert not wide[:, ::2].any()
    expected = normed(rows, norm, EPS)
    assert (made.weighted is None) == (expected.weighted is None)
    if made.weighted is not None:
        assert torch.equal(made.weighted, expected.weighted)
        assert torch.equal(made.squares[:, :count], expected.squares[:, :count])


def test_reference_norms_as_transformers_does() -> None:
    drawn = tensors((4, 8, 96, False), torch.bfloat16, torch.device("cpu"))
    norm = Qwen3RMSNorm(96, eps=EPS).to(torch.bfloat16)
    norm.weight.data = drawn["norm"]
    expected = F.linear(norm(drawn["x"]), drawn["weight"])
    got = linear_reference(Normed(drawn["x"], drawn["norm"], EPS), drawn["weight"])
    assert torch.equal(got, expected)


def test_float16_norm_survives_products_out_of_range(device: torch.device) -> None:
    drawn = tensors((2, 8, 256, False), torch.float16, device)
    given = {"x": drawn["x"].clone(), "weight": drawn["weight"], "norm": drawn["norm"] * 20}
    given["x"][:, 7] = 30000.0  # one of the huge activations that transformers have
    assert error(linear(**fed(given)), exact(given, False)).max() < 2e-3


@pytest.mark.parametrize(
    ("size", "dtype"), [(0.02, torch.bfloat16), (0.001, torch.float16)], ids=str
)
def test_small_rows_under_a_small_norm_keep_their_bits(
    size: float, dtype: torch.dtype, device: torch.device
) -> None:
    """An embedding under the first norm of a Llama: hundredths of hundredths."""
    drawn = tensors((4, 24, 200, False), torch.float32, device)
    x = drawn["x"] / drawn["x"].norm(dim=1, keepdim=True) * 200**0.5 * size
    given = {"x": x, "weight": drawn["weight"], "norm": drawn["norm"] * 0.02}
    given = {name: value.to(dtype) for name, value in given.items()}
    assert error(linear(**fed(given)), exact(given, False)).max() < 2 * torch.finfo(dtype).eps


def test_counters_are_left_at_zero_and_results_repeat(device: torch.device) -> None:
    shape = (4, 24, 4096, False)
    assert plan(*shape[1:3], gated=False, dtype=torch.float32).split > 1
    drawn = tensors(shape, torch.float32, device)
    x = normed(drawn["x"], drawn["norm"], EPS)
    first = linear(x, drawn["weight"])
    for _ in range(2):
        assert torch.equal(linear(x, drawn["weight"]), first)


def test_many_rows_and_crossed_strides_go_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.delattr(few_rows, "launch")
    x, weight = torch.ones(17, 32, device=device), torch.ones(32, 16, device=device)
    assert linear(x, weight.T.contiguous()).shape == (17, 16)
    many = torch.ones(few_rows.MOST_ROWS + 1, 32, device=device, dtype=torch.bfloat16)
    assert linear(many, weight.T.contiguous().bfloat16()).shape == (len(many), 16)
    assert linear(x[:2], weight.T).shape == (2, 16)


def test_rows_may_lie_apart(device: torch.device) -> None:
    drawn = tensors((8, 16, 64, False), torch.float32, device)
    x, weight = drawn["x"][::2], drawn["weight"]
    residual = drawn["residual"][::2]
    torch.testing.assert_close(
        linear(x, weight, residual=residual), linear_reference(x, weight, residual=residual)
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 40, 200), torch.float32),
        ((5, 40, 200), torch.float16),
        ((16, 24, 4096), torch.bfloat16),
        ((20, 24, 64), torch.float32),
        ((70, 24, 64), torch.bfloat16),
    ],
    ids=str,
)
def test_a_product_prepares_the_norm_after_it(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Its rows are linear's own, and the next product reads them normed, wherever they lie."""
    drawn = tensors((*shape, False), dtype, device)
    given = {name: drawn[name] for name in ("x", "weight", "residual")}
    rows = linear(**given)
    norm = (1 + torch.arange(shape[1]) / 64).to(device, dtype)
    wide = rows.new_zeros(len(rows), 3, shape[1])
    made = linear_then_norm(**given, norm=norm, eps=EPS, out=wide[:, 1])
    if device.type == "cpu":
        assert torch.equal(made.rows, rows)
    else:  # a product and a sum are rounded once, in PyTorch's operations twice
        twice = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(made.rows, rows, rtol=twice, atol=twice)
        rows = made.rows
    assert torch.equal(wide[:, 1], rows)
    assert not wide[:, ::2].any()
    following = tensors((1, 32, shape[1], False), dtype, device)["weight"]
    truth = exact({"x": rows, "norm": norm, "weight": following}, False)
    limit = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert error(linear(made, following), truth).max() < limit
    assert (made.weighted is not None) == takes(shape[0], dtype)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float32), (16, torch.bfloat16), (17, torch.float32), (17, torch.float16)],
    ids=str,
)
def test_embedded_rows_are_the_tables_and_normed_as_any(
    count: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Of a table whose rows lie apart, with tokens that come twice."""
    wide = tensors((40, 8, 96, False), dtype, device)["x"]
    for table in (wide, wide[:, :72]):
        norm = (1 + torch.arange(table.shape[1]) / 64).to(device, dtype)
        tokens = (torch.arange(count) * 7 % 11 + 29).to(device)
        for scaled, rows in (
            (table, table[tokens]),
            (ScaledEmbedding(table, 5.625), table[tokens] * 5.625),
        ):
            made, wanted = embedded(tokens, scaled, norm, EPS), normed(rows, norm, EPS)
            assert torch.equal(made.rows, rows)
            assert made.rows.is_contiguous()
            if not takes(count, dtype):
                assert made.weighted is None
                continue
            assert torch.equal(made.weighted, wanted.weighted)
            assert torch.equal(made.squares[:, :count], wanted.squares[:, :count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (11, 40, 200, True),
        pytest.param((16, 24, 4096, False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_row_among_others_is_what_it_is_alone_to_the_last_bit(
    shape: tuple[int, int, int, bool], dtype: torch.dtype, device: torch.device
) -> None:
    """Also through the norm that the product before it prepared, and a K that programs share."""
    drawn = tensors(shape, dtype, device)
    following = tensors((1, shape[2], 48, False), dtype, device)
    x = tensors((shape[0], 8, 48, False), dtype, device)["x"]

    def run(rows: Tensor) -> Tensor:
        made = linear_then_norm(rows, following["weight"], drawn["norm"], EPS)
        return linear(made, drawn["weight"], gated=shape[3])

    together = run(x)
    for row in (0, 4, len(x) - 1):
        assert torch.equal(run(x[row : row + 1])[0], together[row])


def test_rows_to_be_normed_may_lie_apart(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """As captured hidden states do; and the kernel takes them, not the seven operations."""
    drawn = tensors((20, 8, 96, False), torch.float32, device)
    wide = drawn["x"].new_zeros(20, 3, 96)
    wide[:, 1] = drawn["x"]
    expected = pointwise.rms_norm_reference(drawn["x"], drawn["norm"], EPS)
    monkeypatch.delattr(pointwise, "rms_norm_reference")
    found = pointwise.rms_norm(wide[:, 1], drawn["norm"], EPS)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_weights_in_groups_are_one_product(device: torch.device) -> None:
    drawn = tensors((3, 60, 64, False), torch.float32, device)
    groups = drawn["weight"].view(3, 20, 64)[:, 4:]  # rows of each group lie together
    truth = drawn["x"].double() @ groups.flatten(0, 1).double().T
    assert error(linear(drawn["x"], groups), truth).max() < 1e-6
    assert error(linear_reference(drawn["x"], groups), truth).max() < 1e-6


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.bfloat16), (200, torch.float32), (200, torch.bfloat16)], ids=str
)
def test_norm_and_gate_of_many_rows_equal_their_references(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    drawn = tensors((20, 8, width, False), dtype, device)
    pairs = (
        (pointwise.rms_norm, pointwise.rms_norm_reference, (drawn["x"], drawn["norm"], EPS)),
        (pointwise.gate, pointwise.gate_reference, (drawn["x"],)),
    )
    for kernel, reference, arguments in pairs:
        found, expected = kernel(*arguments), reference(*arguments)
        # Sums in another order, and another exponential, may turn a rounding or two.
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        if dtype == torch.bfloat16:
            assert (found != expected).float().mean() < 0.01


def test_plan_keeps_what_was_measured() -> None:
    def cut(n: int, k: int, gated: bool = False) -> tuple[int, int, int]:
        made = plan(n, k, gated=gated, dtype=torch.bfloat16)
        return made.columns, made.stages, made.split

    assert cut(6144, 4096) == (64, 6, 1)
    assert cut(4096, 4096) == (32, 4, 2)
    assert cut(24576, 4096, True) == (32, 3, 1)
    assert cut(4096, 12288) == (64, 4, 4)
    assert cut(2560, 9728) == (32, 4, 4)
    assert cut(151936, 4096) == (64, 4, 1)


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TENSORS = ("x", "weight", "bias", "residual", "out", "then", "weighted")
NUMBERS = (
    "width",
    "x_stride",
    "squares_stride",
    "sums_stride",
    "weight_stride",
    "group_stride",
    "scales_stride",
    "residual_stride",
    "out_stride",
)


def compile_case(
    n: int,
    k: int,
    extras: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 16,
    activation: str = pointwise.SILU,
    scaled: ScaledWeight | None = None,
) -> Case:
    flags = {name: name in extras for name in ("bias", "residual", "gated", "then")}
    cut = plan(n, k, gated=flags["gated"], dtype=dtype, rows=rows, scaled=scaled)
    types = {
        **dict.fromkeys(TENSORS, POINTERS[dtype]),
        "scales": "*fp32" if scaled is None or scaled.pairs is None else "*i32",
        **{"squares": "*fp32", "sums": "*fp32", "parts": "*fp32", "arrivals": "*i32", "m": "i32"},
        **dict.fromkeys(NUMBERS, "i32"),
        "eps": "fp32",
    }
    if scaled is not None:
        types["weight"] = {"int8": "*i8", "int4": "*u8", "fp8": "*fp8e4nv"}[scaled.kind]
    sources = 128 if "norm" in extras else 0
    flags |= {"sources": sources, "activation": activation}
    settings = few_rows.constants(cut, dtype, k, scaled=scaled, **flags) | {"OVERLAP": True}
    return Case(few_rows.__name__, "_few_rows", types, settings, aligned=NUMBERS)


@pytest.mark.compiled
def test_compiles_for_the_h200() -> None:
    cases = [
        compile_case(6144, 4096, "norm"),
        compile_case(4096, 4096, "residual then"),
        compile_case(24576, 4096, "norm gated"),
        compile_case(2560, 9728, "residual then"),
        compile_case(151936, 4096, "norm"),
        compile_case(3072, 576, "norm gated"),
        compile_case(6144, 4096, "norm bias"),
        compile_case(24576, 4096, "norm gated", torch.float16),
        compile_case(4096, 640, "norm gated", activation=pointwise.GELU_TANH),
        compile_case(960, 576, "norm", torch.float32),
        compile_case(6144, 4096, "norm", rows=32),
        compile_case(24576, 4096, "norm gated", rows=64),
        compile_case(576, 1536, "residual then", rows=256),
    ]
    for case, found in zip(cases, needs(cases), strict=True):
        assert found.shared <= ROOM[90], case
        assert found.spills == 0, case
