"""Triton compiles a cycle's kernels once, not for each size of batch and each depth."""

import pytest

from tests.engine.kernels import variants
from tests.engine.kernels.variants import BATCHES

PLANS = ("greedy", "sampled")
DEPTHS = (0, 1, 5, 15)  # blocks of 1, of 16, and others; one tile of queries and more

TILED_BY_BATCH = "split_attention._join"
"""How many stretches it joins follows from the rows, and all are joined at once."""


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
    known.pop((TILED_BY_BATCH, None))
    assert ("split_attention._attend", None) in known
    for (kernel, _), by_batch in known.items():
        first, *others = by_batch.values()
        # Products of few rows end at some batch, one after the other.
        assert all(keys <= first for keys in others), (kernel, found.differing(kernel))


def test_depths_bring_none_either(found):
    for plan in PLANS:
        for batch in BATCHES:
            shallow, *deeper = (found.of(plan=plan, batch=batch, depth=d) for d in DEPTHS[1:])
            kernels = {kernel for kernel, _ in shallow}
            for keys in deeper:
                assert {one for one in keys if one[0] in kernels} <= shallow


def test_only_tiles_tell_joins_apart(found):
    assert set(found.differing(TILED_BY_BATCH)) == {"TILE", "SPLITS", "CAUSAL"}
    pairs = {(dict(key)["TILE"], dict(key)["SPLITS"]) for key in found.cycles[TILED_BY_BATCH]}
    assert len(found.cycles[TILED_BY_BATCH]) == 2 * len(pairs)  # the target's and the drafter's


def test_attention_has_two(found):
    assert set(found.differing("split_attention._attend")) == {"CAUSAL"}
