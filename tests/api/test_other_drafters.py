"""Prompt lookup and baselines draft wherever a block drafter does."""

from __future__ import annotations

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.checkpoints import save_drafter
from domino_spec.errors import DominoError, InputError
from tests.engine.runs import own
from tests.support.baselines import random_baseline
from tests.support.families import make_target, plain_greedy, random_prompts

TOKENS = 24


@pytest.mark.parametrize("loop", ["fast", "reference"])
@pytest.mark.parametrize("kind", ["lookup", "medusa", "eagle3"])
def test_a_decoder_drafts_with_any_kind(kind, loop, tmp_path):
    target = own(make_target("llama"))
    draft = "lookup:4" if kind == "lookup" else save_drafter(random_baseline(kind), tmp_path)
    decoder = DominoDecoder.from_pretrained(target, draft, engine=loop, depth=4)
    assert decoder.drafter.kind == kind
    prompts = [random_prompts([7])[0] * 2, random_prompts([9], seed=1)[0]]
    results = decoder.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == plain_greedy(target.model, prompt, TOKENS)
        assert sum(result.stats.offered) > 0
        assert result.run.engine == loop


def test_a_name_that_is_no_drafter_is_refused_at_once():
    with pytest.raises(DominoError, match="lokup"):
        DominoDecoder.from_pretrained(make_target("llama"), "lokup")
    with pytest.raises(InputError, match="expected a name such as 'lookup'"):
        DominoDecoder.from_pretrained(make_target("llama"), 7)
