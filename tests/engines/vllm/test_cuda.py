"""The constructed pair under CUDA graphs in bfloat16; needs a GPU, so CI leaves it out."""

import json

import pytest
import torch

from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import save_bigram_target, save_knowing_drafter, table_answer

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[1, 2, 3], [5] * 9, [7], list(range(10, 30))]
TOKENS = 33


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no-shift"])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_every_draft_is_accepted(tmp_path, method, shift):
    target = save_bigram_target(tmp_path / "target")
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=shift, prefix_len=int(shift))
    if method == "dspark":
        path = draft / "config.json"
        fields = {
            "architectures": ["Qwen3DSparkModel"],
            "sample_from_anchor": shift,
            "dspark_bonus_anchor": not shift,
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    drafts = 8 if method == "dspark" and shift else 7
    result = run_job(
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        target=str(target),
        speculative={"method": method, "model": str(draft), "num_speculative_tokens": drafts},
        prompts=PROMPTS,
        sampling={"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False},
        engine={
            "dtype": "bfloat16",
            "enforce_eager": False,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 30,
        },
    )
    assert [answer[0] for answer in result["answers"][0]] == [
        table_answer(p, TOKENS) for p in PROMPTS
    ]
    assert result["accepted"] == result["drafted"] > 0
