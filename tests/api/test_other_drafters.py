"""Prompt lookup and baselines draft wherever a block drafter does."""

from __future__ import annotations

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.baselines import open_drafter
from domino_spec.baselines.registry import named_baseline
from tests.engine.runs import own
from tests.support.baselines import random_baseline
from tests.support.families import make_target, plain_greedy, random_prompts

TOKENS = 24


def opened(kind: str, target):
    if kind == "lookup":
        return open_drafter("lookup:4", target)
    return named_baseline(kind, random_baseline(kind), target)


@pytest.mark.parametrize("loop", ["fast", "reference"])
@pytest.mark.parametrize("kind", ["lookup", "medusa", "eagle3"])
def test_a_decoder_drafts_with_any_kind(kind, loop):
    target = own(make_target("llama"))
    decoder = DominoDecoder(target, opened(kind, target), engine=loop, depth=4)
    prompts = [random_prompts([7])[0] * 2, random_prompts([9], seed=1)[0]]
    results = decoder.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == plain_greedy(target.model, prompt, TOKENS)
        assert sum(result.stats.offered) > 0
        assert result.run.engine == loop
