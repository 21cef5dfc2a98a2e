"""Triton compiles a cycle's kernels once, not for each size of batch and each depth."""

from collections import Counter

import pytest

from tests.engine.kernels import variants
from tests.engine.kernels.variants import BATCHES

PLANS = ("greedy", "sampled")
DEPTHS = (0, 1, 5, 15)  # blocks of 1, of 16, and others; one tile of queries and more

JOIN, PRODUCT = "split_attention._join", "few_rows._few_rows"
TILED_BY_BATCH = (JOIN, PRODUCT)
"""How many stretches are joined follows from the rows, and all are joined at once; products of more
than 16 rows have taller tiles."""


@pytest.fixture(scope="module", params=[
    ("smollm2-135m", None), pytest.param(("qwen3-8b", 32), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def found(request):
    shape, candidates = request.param
    return variants.recorded(shape, plans=PLANS, depths=DEPTHS, candidates=candidates)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_larger_batch_brings_no_variant_of_a_kernel_it_shares(found, plan, depth):
    known = {}
    for batch in BATCHES:
        for kernel, key in found.of(plan=plan, batch=batch, depth=depth):
            # Drafts among candidates are chosen by the same kernel from some batch on.
            use = kernel, dict(key).get("NAMED")
            known.setdefault(use, {}).setdefault(batch, set()).add(key)
    for kernel in TILED_BY_BATCH:
        known.pop((kernel, None), None)
    assert ("split_attention._attend", None) in known
    for (kernel, _), by_batch in known.items():
        first, *others = by_batch.values()
        assert all(keys <= first for keys in others), (kernel, found.differing(kernel))


def test_depths_bring_none_either(found):
    for plan in PLANS:
        for batch in BATCHES:
            shallow, *deeper = (found.of(plan=plan, batch=batch, depth=d) for d in DEPTHS[1:])
            kernels = {kernel for kernel, _ in shallow} - {PRODUCT}
            for keys in deeper:
                assert {one for one in keys if one[0] in kernels} <= shallow


def test_only_tiles_tell_joins_apart(found):
    assert set(found.differing(JOIN)) == {"TILE", "SPLITS", "CAUSAL"}
    pairs = {(dict(key)["TILE"], dict(key)["SPLITS"]) for key in found.cycles[JOIN]}
    assert len(found.cycles[JOIN]) == 2 * len(pairs)  # the target's and the drafter's


def test_a_product_has_a_variant_for_each_height_of_tiles(found):
    heights = Counter(dict(key)["ROWS"] for key in found.cycles[PRODUCT])
    assert len(heights) == 2
    few, many = (heights[rows] for rows in ("constexpr 16", "constexpr 64"))
    assert 0 < many <= few


def test_attention_has_two(found):
    assert set(found.differing("split_attention._attend")) == {"CAUSAL"}
