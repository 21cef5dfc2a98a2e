import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from domino_spec.engine.kernels import choose as module
from domino_spec.engine.kernels.choose import (
    choose,
    choose_reference,
    restrict,
)
from tests.engine.kernels.offline import ROOM, Case, needs


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64, so that a small vocabulary has several."""
    monkeypatch.setattr(module, "CHUNK", 64)


def draw_logits(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    make = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary, generator=make) * 3).to(device)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1, torch.float32), (50, torch.bfloat16), (64, torch.float16), (300, torch.float32)],
    ids=str,
)
def test_greedy_takes_the_best(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = draw_logits(5, vocabulary, device).to(dtype)
    expected = [max(range(vocabulary), key=lambda at: row[at]) for row in logits.tolist()]
    for run in (choose, choose_reference):
        assert run(logits).tolist() == expected


def test_of_equals_the_lowest_id_wins(device: torch.device) -> None:
    logits = torch.full((4, 200), -1.0, device=device)
    logits[0, [190, 70, 131]] = 2.0
    logits[1, [199, 3]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5], logits[3, 9] = torch.nan, 0.0
    for run in (choose, choose_reference):
        assert run(logits).tolist() == [70, 3, 0, 9]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(2, torch.float32), (64, torch.bfloat16), (300, torch.float32), (300, torch.bfloat16)],
    ids=str,
)
def test_kernel_draws_what_the_reference_draws(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = draw_logits(8, vocabulary, device).to(dtype)
    given = {
        "temperature": torch.tensor([0.0, 0.1, 0.7, 1.0, 1.0, 1.5, 3.0, 0.0], device=device),
        "seeds": torch.tensor([0, 1, 2, 2**62, -1, 2**32 + 1, 1, 9], device=device),
        "positions": torch.tensor([0, 5, 6, 7, 2**40, 1, 131_072, 3], device=device),
    }
    drawn = choose(logits, **given)
    assert torch.equal(drawn, choose_reference(logits, **given))
    assert drawn[0] == logits[0].argmax()
    assert torch.equal(choose(logits, **given), drawn)  # the counters are back at zero


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 17])
@pytest.mark.parametrize("named", [False, True])
def test_a_cpu_draws_what_the_reference_draws(
    chunk: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of flat and of peaked rows, at temperatures so low and high that rounding counts."""
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    monkeypatch.setattr(module, "_HOST_CHUNK", chunk)
    rows, vocabulary = 60, 300
    row = torch.arange(rows)
    logits = draw_logits(rows, vocabulary, torch.device("cpu")) * (row % 4).unsqueeze(1)
    logits[row % 7 == 3, 5:] = -torch.inf
    given = {
        "temperature": torch.tensor([0.0, 1e-6, 1e-3, 0.7, 1.0, 50.0]).repeat(10),
        "seeds": row * 2**40 - 7,
        "positions": row * 2**33 + 1,
        "tokens": torch.arange(vocabulary).flip(0).expand(rows, -1) * 400 if named else None,
    }
    drawn = choose(logits, **given)
    assert torch.equal(drawn, choose_reference(logits, **given))
    logits[4], logits[9, 3], logits[11, 8] = -torch.inf, torch.nan, torch.inf
    odd = choose(logits, **given)
    assert torch.equal(odd, choose_reference(logits, **given))
    assert odd[4] == 0
    assert odd[11] == 8


@pytest.mark.parametrize("shared", [False, True])
def test_columns_get_the_noise_of_their_tokens(shared: bool, device: torch.device) -> None:
    """A few columns of a vocabulary draw what the vocabulary draws with all others removed."""
    rows, vocabulary, width = 8, 300, 90
    logits = draw_logits(rows, vocabulary, device)
    make = torch.Generator().manual_seed(1)
    kept = torch.stack([torch.randperm(vocabulary, generator=make)[:width] for _ in range(rows)])
    tokens = (kept[:1].expand(rows, -1) if shared else kept).to(device)
    row = torch.arange(rows, device=device)
    given = {"temperature": row % 4 * 0.6, "seeds": row * 7, "positions": row + 3}
    removed = torch.full_like(logits, -torch.inf).scatter(1, tokens, logits.gather(1, tokens))
    expected = choose_reference(removed, **given)
    for run in (choose, choose_reference):
        columns = run(logits.gather(1, tokens), **given, tokens=tokens)
        assert torch.equal(tokens.gather(1, columns.unsqueeze(1)).squeeze(1), expected)


def test_removed_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((24, 130), -torch.inf, device=device)
    logits[:, [7, 128]] = torch.tensor([-50.0, -51.0], device=device)
    row = torch.arange(24, device=device)
    hot = torch.full((24,), 100.0, device=device)
    drawn = choose(logits, temperature=hot, seeds=row, positions=row)
    assert set(drawn.tolist()) == {7, 128}


def test_draws_need_seeds_and_positions() -> None:
    with pytest.raises(ValueError, match="seeds and positions"):
        choose(torch.zeros(1, 4), temperature=torch.ones(1))


def test_draws_do_not_depend_on_the_batch() -> None:
    logits = draw_logits(1, 90, torch.device("cpu")).expand(6, -1)
    given = {
        "temperature": torch.ones(6),
        "seeds": torch.arange(6),
        "positions": torch.arange(10, 16),
    }
    together = choose_reference(logits, **given)
    for row in range(6):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        assert choose_reference(logits[row : row + 1], **alone) == together[row]


# ---- Are the draws what they should be? All deterministic: these seeds pass or they do not.


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations above its mean, for the degrees of freedom at hand."""
    freedom = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return (value - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_the_softmax(heat: float, along: str) -> None:
    draws = 40_000
    logits = torch.linspace(-3, 3, 12)
    moving, still = torch.arange(draws), torch.full((draws,), 17)
    drawn = choose_reference(
        logits.expand(draws, -1),
        temperature=torch.full((draws,), heat),
        seeds=moving if along == "seeds" else still,
        positions=moving if along == "positions" else still,
    )
    expected = (logits.double() / heat).softmax(dim=0) * draws
    assert abs(chi_square(drawn.bincount(minlength=12), expected)) < 4


def test_pairs_of_neighbouring_draws_are_independent() -> None:
    """Over 8 x 8 outcomes of neighbours in position and in seed alike."""
    side, kinds = 250, 8
    seeds, positions = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    drawn = choose_reference(
        torch.zeros(side * side, kinds),
        temperature=torch.ones(side * side),
        seeds=seeds.flatten(),
        positions=positions.flatten(),
    ).view(side, side)
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        counts = (one * kinds + other).flatten().bincount(minlength=kinds**2)
        expected = torch.full((kinds**2,), counts.sum() / kinds**2)
        assert abs(chi_square(counts, expected)) < 4


# ---- restrict


def warped(logits: Tensor, heat: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(heat)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    return chain(None, logits[None].float())[0]  # type: ignore[arg-type]


SETTINGS = [  # temperature, top-k, top-p, min-p
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.6, 20, 0.95, 0.0),
    (1.5, 50, 0.8, 0.02),
    (0.3, 1, 0.5, 0.9),
    (2.0, 10_000, 0.99, 1.0),
    (0.9, 3, 1e-6, 0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_restrict_removes_what_transformers_removes(dtype: torch.dtype) -> None:
    for trial in range(20):
        make = torch.Generator().manual_seed(trial)
        logits = torch.randn(len(SETTINGS), 400, generator=make).mul(3)
        logits[:, 10:20] = -torch.inf
        logits = logits.to(dtype)
        heat, top_k, top_p, min_p = (
            torch.tensor(column, dtype=kind)
            for column, kind in zip(
                zip(*SETTINGS, strict=True),
                (torch.float32, torch.int64, torch.float64, torch.float32),
                strict=True,
            )
        )
        got = restrict(logits, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
        assert got.dtype == dtype
        for row, setting in enumerate(SETTINGS):
            removed = warped(logits[row], *setting) == -torch.inf
            expected = logits[row].masked_fill(removed, -torch.inf)
            if dtype == torch.float32:
                assert torch.equal(got[row], expected)
            else:  # ties, of which Transformers' unstable sort may remove any
                assert torch.equal(got[row].sort().values, expected.sort().values)


def test_restrict_leaves_greedy_rows_alone_and_skips_what_is_off() -> None:
    logits = draw_logits(2, 30, torch.device("cpu"))
    heat = torch.tensor([0.0, 1.0])
    assert torch.equal(restrict(logits, temperature=heat), logits)
    got = restrict(logits, temperature=heat, top_k=torch.tensor([2, 2]))
    assert torch.equal(got[0], logits[0])
    assert (got[1] > -torch.inf).sum() == 2
    same = restrict(
        logits,
        temperature=heat,
        top_k=torch.tensor([0, 0]),
        top_p=torch.ones(2),
        min_p=torch.zeros(2),
    )
    assert torch.equal(same, logits)


@pytest.mark.compiled
@pytest.mark.parametrize(("draws", "named"), [(False, False), (True, False), (True, True)])
def test_compiles_for_the_h200(draws: bool, named: bool) -> None:
    types = {
        "logits": "*bf16",
        "temperature": "*fp32" if draws else "*bf16",
        "seeds": "*i64",
        "positions": "*i64",
        "names": "*i64",
        "chosen": "*i64",
        "parts": "*i64",
        "arrivals": "*i32",
        "stride": "i32",
        "name_stride": "i32",
        "vocabulary": "i32",
    }
    settings = {"CHUNK": 4096, "CHUNKS": 38, "DRAWS": draws, "NAMED": named}
    aligned = ("stride", "name_stride", "vocabulary")
    found = needs([Case(module.__name__, "_choose_kernel", types, settings, aligned, warps=8)])[0]
    assert found.shared <= ROOM[90]
    assert found.spills == 0
