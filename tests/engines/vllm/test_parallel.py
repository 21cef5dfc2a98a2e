"""Two tensor-parallel ranks: head replicated, embedding and lm_head cut, drafts still all right."""

import pytest

from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import save_bigram_target, save_knowing_drafter
from tests.engines.vllm.test_v1 import PROMPTS, speculative, table_answer

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")


@pytest.mark.parametrize("shift", [True, False])
def test_two_ranks_accept_every_draft(tmp_path, shift):
    target = str(save_bigram_target(tmp_path / "target"))
    draft = save_knowing_drafter(tmp_path / "draft", shift_label=shift, prefix_len=int(shift))
    result = run_job(
        target=target,
        speculative=speculative(draft),
        prompts=PROMPTS,
        engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    )
    assert result["accepted"] == result["drafted"] > 100
    assert result["answers"][0] == [[table_answer(prompt, 32)] for prompt in PROMPTS]
