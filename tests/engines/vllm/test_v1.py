"""The V1 runner of an unmodified vLLM on a CPU: the constructed pair and random drafters."""

import pytest
import torch

from domino_spec.checkpoints import export_drafter
from domino_spec.drafter import DominoHeadConfig, MarkovHeadConfig
from domino_spec.targets import load_target
from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import (
    save_bigram_target,
    save_knowing_drafter,
    save_random_drafter,
    successor,
)
from tests.engines.vllm.reference import reference_blocks

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

BLOCK = 8
HEAD = DominoHeadConfig(emb_dim=24, gru_hidden_dim=32, pure_draft_prefix_len=1)
PROMPTS = [[1, 2, 3], [5] * 9, [7, 11], list(range(20))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_bigram_target(tmp_path_factory.mktemp("target")))


def table_answer(prompt: list[int], length: int) -> list[int]:
    after, answer = successor(), []
    for _ in range(length):
        answer.append(int(after[(prompt + answer)[-1]]))
    return answer


def speculative(folder, drafts: int = BLOCK - 1, **more):
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": drafts, **more}


@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (True, 0), (False, 0)])
def test_a_drafter_that_knows_the_target_is_always_right(target, tmp_path, shift, prefix):
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=shift, prefix_len=prefix)
    result = run_job(target=target, speculative=speculative(draft), prompts=PROMPTS)
    assert result["accepted"] == result["drafted"] > 100
    assert result["answers"][0] == [[table_answer(prompt, 32)] for prompt in PROMPTS]


def test_without_its_head_it_is_always_wrong(target, tmp_path):
    """So the pair tells right from wrong; and a plain DFlash drafter stays vLLM's own."""
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=False, prefix_len=0, head=False)
    result = run_job(target=target, speculative=speculative(draft), prompts=PROMPTS)
    assert result["accepted"] == 0
    assert result["answers"][0] == [[table_answer(prompt, 32)] for prompt in PROMPTS]


def test_our_export_for_vllm_with_its_own_rows_of_a_reduced_vocabulary(tmp_path):
    """The form that stores the target's lm_head rows drafts what our own rollout drafts."""
    saved = str(save_bigram_target(tmp_path / "target", lively=True))
    loaded = load_target(saved, device="cpu", dtype=torch.float32).target
    _, drafter = save_random_drafter(tmp_path / "plain", seed=3, head=HEAD, draft_vocab_size=40)
    tokens = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40]
    drafter.draft_tokens.copy_(tokens)
    folder = export_drafter(
        drafter, tmp_path / "draft", to="vllm", dtype=torch.float32,
        lm_head=loaded.lm_head_rows(tokens),
    )  # fmt: skip
    prompt = [9, 4, 17, 30, 2]
    result = run_job(target=saved, speculative=speculative(folder), prompts=[prompt], record=True)
    text = prompt + result["answers"][0][0][0]
    ours = reference_blocks(loaded, drafter, text, first=len(prompt), depth=BLOCK - 1)
    assert len(result["blocks"]) > 10
    assert all(block in ours for block in result["blocks"])


def test_chunked_prefill_and_prefix_caching_change_nothing(target, tmp_path):
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=True, prefix_len=1)
    prompts = [[*range(1, 60), *range(40)], [*range(1, 60), *range(20), 3, 9], [2, 4]]
    result = run_job(
        target=target,
        speculative=speculative(draft),
        prompts=prompts,
        rounds=2,
        engine={
            "max_num_batched_tokens": 24, "max_num_seqs": 2, "enable_chunked_prefill": True,
            "enable_prefix_caching": True, "block_size": 32,
        },
    )  # fmt: skip
    assert result["accepted"] == result["drafted"] > 100
    expected = [[table_answer(prompt, 32)] for prompt in prompts]
    assert result["answers"] == [expected, expected]


def test_more_drafts_than_the_block_has_slots_are_refused(target, tmp_path):
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=True, prefix_len=1)
    with pytest.raises(AssertionError, match="trained with 8. Set it to 7"):
        run_job(target=target, speculative=speculative(draft, 8), prompts=PROMPTS)


CASES = {
    "shift": {"head": HEAD},
    "no shift": {"head": HEAD, "shift_label": False},
    "shift, head from the first draft": {
        "head": DominoHeadConfig(emb_dim=24, gru_hidden_dim=32, pure_draft_prefix_len=0)
    },
    "Markov head": {"head": MarkovHeadConfig(emb_dim=24), "shift_label": False},
    "shifted DFlash": {"head": None},
    "reduced vocabulary": {"head": HEAD, "draft_vocab_size": 40},
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_our_own_rollout(tmp_path, case):
    target = str(save_bigram_target(tmp_path / "target", lively=True))
    folder, drafter = save_random_drafter(tmp_path / "draft", seed=3, **CASES[case])
    prompt = [9, 4, 17, 30, 2]
    result = run_job(target=target, speculative=speculative(folder), prompts=[prompt], record=True)
    tokens = prompt + result["answers"][0][0][0]
    loaded = load_target(target, device="cpu", dtype=torch.float32).target
    ours = reference_blocks(loaded, drafter, tokens, first=len(prompt), depth=BLOCK - 1)
    assert len(result["blocks"]) > 10
    assert len({tuple(block[1:]) for block in ours}) > 10, "drafts that differ, or nothing is shown"
    for block in result["blocks"]:
        assert block in ours, f"{case}: vLLM drafted what we never would"
        ours.remove(block)
