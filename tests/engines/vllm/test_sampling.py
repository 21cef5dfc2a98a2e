"""Sampled requests on the V1 runner: on a CPU vLLM itself gets them wrong under any speculation.

So what sampling gives is tested on the V2 runner (`test_v2.py`). When this test passes, vLLM has
mended it, and sampled requests can be tested here too.
"""

import pytest

from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import save_bigram_target
from tests.engines.vllm.test_v1 import PROMPTS, table_answer

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

NGRAMS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1,
}  # fmt: skip
TOKENS = 120


@pytest.mark.xfail(strict=True, reason="vLLM's V1 runner does not verify sampled drafts on a CPU")
def test_vllms_own_ngrams_leave_a_sure_target_alone(tmp_path):
    target = str(save_bigram_target(tmp_path / "target"))
    sampling = {"temperature": 0.2, "max_tokens": TOKENS}
    result = run_job(target=target, speculative=NGRAMS, prompts=PROMPTS, sampling=sampling)
    assert result["answers"][0] == [[table_answer(prompt, TOKENS)] for prompt in PROMPTS]


def test_without_drafts_a_sure_target_says_what_it_is_sure_of(tmp_path):
    """The same temperature changes nothing where nothing is drafted: the target is sharp enough."""
    target = str(save_bigram_target(tmp_path / "target"))
    sampling = {"temperature": 0.2, "max_tokens": TOKENS}
    result = run_job(target=target, speculative=None, prompts=PROMPTS, sampling=sampling)
    assert result["answers"][0] == [[table_answer(prompt, TOKENS)] for prompt in PROMPTS]
