"""The V1 runner of an unmodified vLLM on a CPU: the constructed pair and random drafters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_spec.checkpoints import export_drafter
from domino_spec.drafter import DominoHeadConfig, DraftModel, MarkovHeadConfig
from domino_spec.targets import load_target
from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import (
    save_bigram_target,
    save_knowing_drafter,
    save_random_drafter,
    table_answer,
)
from tests.engines.vllm.reference import reference_blocks

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

BLOCK = 8
HEAD = DominoHeadConfig(emb_dim=24, gru_hidden_dim=32, pure_draft_prefix_len=1)
PROMPTS = [[1, 2, 3], [5] * 9, [7, 11], list(range(20))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_bigram_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    return str(save_bigram_target(tmp_path_factory.mktemp("lively"), lively=True))


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


WINDOW = 16
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": WINDOW}
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
def test_drafts_are_those_of_our_own_rollout(lively, tmp_path, case):
    folder, drafter = save_random_drafter(tmp_path / "draft", seed=3, **CASES[case])
    assert_drafts_are_ours(lively, folder, drafter)


def test_drafts_beyond_a_sliding_window(lively, tmp_path):
    """A drafter as training makes them by default; its window does not hold the prompt."""
    folder, drafter = save_random_drafter(tmp_path / "draft", seed=3, head=HEAD, **SLIDING)
    prompt = [(7 * place + place // 9) % 60 for place in range(40)]
    assert_drafts_are_ours(lively, folder, drafter, prompt=prompt)


def test_our_export_for_vllm_with_its_own_rows_of_a_reduced_vocabulary(lively, tmp_path):
    """The form that stores the target's lm_head rows drafts what our own rollout drafts."""
    assert_drafts_are_ours(lively, *save_reduced_export(lively, tmp_path))


def save_reduced_export(target: str, folder: Path) -> tuple[Path, DraftModel]:
    """A random drafter of a reduced vocabulary with the target's lm_head rows for it."""
    _, drafter = save_random_drafter(folder / "plain", seed=3, **CASES["reduced vocabulary"])
    loaded = load_target(target, device="cpu", dtype=torch.float32).target
    rows = loaded.lm_head_rows(drafter.draft_tokens)
    return export_drafter(
        drafter, folder / "draft", to="vllm", dtype=torch.float32, lm_head=rows
    ), drafter


def assert_drafts_are_ours(
    target: str,
    folder: Path,
    drafter: DraftModel,
    *,
    prompt: Sequence[int] = (9, 4, 17, 30, 2),
    **job: Any,
) -> list[int]:
    """Block by block, with a target whose answer is not simple; gives prompt and answer."""
    prompt = list(prompt)
    result = run_job(
        target=target, speculative=speculative(folder), prompts=[prompt], record=True, **job
    )
    tokens = prompt + result["answers"][0][0][0]
    loaded = load_target(target, device="cpu", dtype=torch.float32).target
    ours = reference_blocks(loaded, drafter, tokens, first=len(prompt), depth=BLOCK - 1)
    assert len(result["blocks"]) > 10
    assert len({tuple(block[1:]) for block in ours}) > 10, "drafts that differ, or nothing is shown"
    for block in result["blocks"]:
        assert block in ours, "vLLM drafted what we never would"
        ours.remove(block)
    return tokens
