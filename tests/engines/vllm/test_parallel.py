"""Two tensor-parallel ranks: head replicated, embedding and lm_head cut, drafts still all right."""

import pytest

from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import (
    save_bigram_target,
    save_knowing_drafter,
    save_random_drafter,
)
from tests.engines.vllm.test_v1 import (
    CASES,
    PROMPTS,
    assert_drafts_are_ours,
    save_reduced_export,
    speculative,
    table_answer,
)

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

TWO_RANKS = {"engine": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}


@pytest.mark.parametrize("shift", [True, False])
def test_two_ranks_accept_every_draft(tmp_path, shift):
    target = str(save_bigram_target(tmp_path / "target"))
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=shift, prefix_len=int(shift))
    result = run_job(target=target, speculative=speculative(draft), prompts=PROMPTS, **TWO_RANKS)
    assert result["accepted"] == result["drafted"] > 100
    assert result["answers"][0] == [[table_answer(prompt, 32)] for prompt in PROMPTS]


@pytest.mark.parametrize("own_rows", [False, True], ids=["the target's lm_head", "its own rows"])
def test_two_ranks_draft_what_we_do_from_a_reduced_vocabulary(tmp_path, own_rows):
    """Its columns do not lie as the lm_head was cut."""
    target = str(save_bigram_target(tmp_path / "target", lively=True))
    if own_rows:
        folder, drafter = save_reduced_export(target, tmp_path)
    else:
        folder, drafter = save_random_drafter(
            tmp_path / "draft", seed=3, **CASES["reduced vocabulary"]
        )
    assert_drafts_are_ours(target, folder, drafter, **TWO_RANKS)
