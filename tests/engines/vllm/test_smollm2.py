"""A real model with its released drafter: vLLM gives our decoder's tokens, and as many a cycle."""

import pytest
import torch

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import encode_prompt
from domino_spec.demo import PROMPTS
from domino_spec.targets import load_target
from tests.engines.vllm.job import run_job
from tests.engines.vllm.reference import reference_blocks

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

TOKENS = 128
DRAFTS = 15


def test_same_tokens_same_drafts_and_as_many_tokens_a_cycle(smollm2_folder, released_folder):
    loaded = load_target(str(smollm2_folder), device="cpu", dtype=torch.float32)
    decoder = DominoDecoder.from_pretrained(loaded, str(released_folder), depth=DRAFTS)
    prompts = [
        encode_prompt([{"role": "user", "content": text}], loaded.tokenizer) for text in PROMPTS
    ]
    ours = [decoder.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    result = run_job(
        target=str(smollm2_folder),
        speculative={
            "method": "dflash", "model": str(released_folder), "num_speculative_tokens": DRAFTS,
        },
        prompts=prompts,
        sampling={"max_tokens": TOKENS, "stop_token_ids": [loaded.tokenizer.eos_token_id]},
        engine={
            "max_model_len": 1024, "max_num_seqs": len(prompts), "kv_cache_memory_bytes": 1 << 30,
        },
        record=True,
    )  # fmt: skip
    assert [answer[0] for answer in result["answers"][0]] == [one.tokens for one in ours]

    known = {
        tuple(block)
        for prompt, one in zip(prompts, ours, strict=True)
        for block in reference_blocks(
            loaded.target,
            decoder.drafter.model,
            prompt + one.tokens,
            first=len(prompt),
            depth=DRAFTS,
        )
    }
    theirs = [tuple(block) for block in result["blocks"]]
    inside = [block for block in theirs if block in known]
    assert len(theirs) - len(inside) <= len(prompts), "at most one block a request, past its end"

    committed = sum(len(one.tokens) - 1 for one in ours)  # the prefill's token is in no cycle
    mine = committed / sum(one.stats.cycles for one in ours)
    # vLLM drafts once after the prefill and once after each cycle but a request's last, before
    # which it may not know that the request has ended; its own counters leave that cycle out.
    assert committed / len(inside) == pytest.approx(mine, rel=0.02)
    assert mine > 2, "a trained drafter"
