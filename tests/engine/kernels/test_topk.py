from typing import Any

import pytest
import torch
from torch import Tensor

from domino_spec.engine.kernels import topk as module
from domino_spec.engine.kernels.keys import pack_reference, unpack_reference
from domino_spec.engine.kernels.topk import top_candidates, top_candidates_reference
from tests.engine.kernels.offline import ROOM, Case, needs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 128 in groups of 4: the interpreter sorts slowly."""
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "GROUP", 4)


def by_sorting(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable sort keeps the lowest of equal ids first."""
    values, ids = logits.float().sort(dim=1, descending=True, stable=True)
    return values[:, :k].to(logits.dtype), ids[:, :k]


def draw(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits with many ties, infinities and zeros of both signs."""
    make = torch.Generator().manual_seed(rows * vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=make) * 4).round() / 2
    logits[torch.rand(logits.shape, generator=make) < 0.1] = -torch.inf
    logits[torch.rand(logits.shape, generator=make) < 0.1] *= -1.0
    logits[:, -1] = torch.inf
    return logits.to(device, dtype)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "k", "dtype"),
    [
        (1, 40, 5, torch.bfloat16),
        (3, 128, 1, torch.float16),
        (2, 300, 32, torch.float32),
        (2, 300, 32, torch.bfloat16),
        (2, 400, 7, torch.float16),
        (2, 50, 20, torch.float32),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small")
def test_candidates_are_the_stable_sorts(
    rows: int, vocabulary: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = draw(rows, vocabulary, dtype, device)
    values, ids = by_sorting(logits, k)
    for run in (top_candidates, top_candidates_reference):
        got_values, got_ids = run(logits, k)
        assert got_values.dtype == dtype
        assert torch.equal(got_ids, ids)
        assert torch.equal(got_values, values)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_as_large_as_in_production(dtype: torch.dtype, device: torch.device) -> None:
    """Several chunks, many groups, and the best in all of them, the last and partial one too."""
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 16700, generator=make)
    for best, place in enumerate((16699, 0, 8191, 8192, 16383, 16384, 16640)):
        logits[:, place] = 8.0 - best // 2  # every second one a tie
    logits = logits.to(device, dtype)
    values, ids = by_sorting(logits, 32)
    assert len({place // module.CHUNK for place in ids[0].tolist()}) == 3
    got_values, got_ids = top_candidates(logits, 32)
    assert torch.equal(got_ids, ids)
    assert torch.equal(got_values, values)


@pytest.mark.parametrize(
    ("lowest", "dtype"),
    [(-torch.inf, torch.float32), (-7.0, torch.bfloat16), (-torch.inf, torch.float16)],
    ids=str,
)
@pytest.mark.usefixtures("small")
def test_what_fills_up_is_below_any_token(
    lowest: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Groups and places past the vocabulary's end, where every logit is negative."""
    logits = torch.full((2, 278), lowest).to(device, dtype)
    logits[:, 276] = -3.0
    for run in (top_candidates, top_candidates_reference):
        values, ids = run(logits, 8)
        assert ids.tolist() == [[276, *range(7)]] * 2
        assert (values[:, 1:] == lowest).all()


@pytest.mark.usefixtures("small")
def test_a_row_with_less_than_k_possible_tokens(device: torch.device) -> None:
    logits = torch.full((1, 100), -torch.inf, device=device)
    logits[0, 99] = -3.0
    for run in (top_candidates, top_candidates_reference):
        assert run(logits, 4)[1].tolist() == [[99, 0, 1, 2]]


@pytest.mark.usefixtures("small")
def test_rows_may_lie_apart_and_calls_repeat(device: torch.device) -> None:
    logits = draw(4, 120, torch.float32, device)[::2, 5:100]
    for _ in range(2):
        assert torch.equal(top_candidates(logits, 8)[1], by_sorting(logits, 8)[1])


@pytest.mark.usefixtures("small")
def test_groups_are_larger_where_there_would_be_too_many_and_then_the_reference_takes_it(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 64)
    groups: list[int] = []
    launch = module._top_kernel.run

    def run(*given: Any, **shapes: Any) -> Any:
        groups.append(shapes["GROUP"])
        return launch(*given, **shapes)

    monkeypatch.setattr(module._top_kernel, "run", run)
    for vocabulary, launched in ((256, [4]), (257, [8]), (512, [8]), (513, [])):
        logits = draw(2, vocabulary, torch.bfloat16, device)
        assert torch.equal(top_candidates(logits, 16)[1], by_sorting(logits, 16)[1])
        assert groups == launched
        groups.clear()


def test_more_candidates_than_tokens_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="9 candidates of 8"):
        top_candidates(torch.zeros(1, 8, device=device), 9)


def test_keys_order_as_scores_do() -> None:
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, torch.inf])
    keys = pack_reference(scores, torch.full((8,), 151_935))
    assert (keys.diff() > 0).all()
    values, ids = unpack_reference(keys)
    assert torch.equal(values, scores)
    assert (ids == 151_935).all()
    signs = pack_reference(torch.tensor([0.0, -0.0]), torch.tensor([7, 7]))
    assert signs[0] == signs[1]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("vocabulary", "logits", "keys"),
    [(151_936, "*bf16", "*i32"), (49_152, "*fp32", "*i64")],
)
def test_compiles_for_the_h200(vocabulary: int, logits: str, keys: str) -> None:
    """With short keys and with long ones."""
    (found,) = needs([compile_case(vocabulary, kept=32, logits=logits, keys=keys)])
    assert found.shared <= ROOM[90]
    assert found.spills == 0


def compile_case(vocabulary: int, *, kept: int, logits: str, keys: str) -> Case:
    types = {
        "logits": logits,
        "values": logits,
        "ids": "*i64",
        "parts": keys,
        "arrivals": "*i32",
        "stride": "i32",
        "vocabulary": "i32",
        "k": "i32",
    }
    settings = {
        "CHUNK": module.CHUNK,
        "KEPT": kept,
        "CHUNKS": -(-vocabulary // module.CHUNK),
        "GROUP": module.GROUP,
    }
    return Case(module.__name__, "_top_kernel", types, settings, ("stride", "vocabulary"), warps=8)
