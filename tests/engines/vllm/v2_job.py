"""A vLLM engine on the V2 runner for a test, in a process of its own.

A job names the `target` folder, vLLM's `speculative` configuration, the `prompts` as token ids and
how to answer them (`max_tokens`, `sampling`). Salts named in `without` are left out: "vllm" for
that of vLLM from 0.29 on, "ours" for the plugin's. The result has the answers, vLLM's own counts of
drafts and, for each block, what the speculator drafted and after which token.
"""

from collections.abc import Collection
from functools import wraps
from typing import Any

from tests.engines.vllm import v2_on_cpu
from tests.engines.vllm.job import CACHE_BYTES, IMPORTED, inspect_here, keep
from tests.support.forks import serve

COUNTS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What the job wants, in this process."""
    from vllm import LLM, SamplingParams

    inspect_here()
    v2_on_cpu.use_plain_top_p()
    blocks = record_blocks()
    leave_out_salts(job.get("without", ()))
    options = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": job["max_num_seqs"],
        "kv_cache_memory_bytes": job["max_num_seqs"] * CACHE_BYTES,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # they hold the counts of drafts
        "seed": 0,
    }
    llm = LLM(
        job["target"],
        speculative_config=job["speculative"],
        **{**options, **job.get("engine", {})},
    )
    keep(llm)
    params = [
        SamplingParams(
            **job["sampling"],
            max_tokens=job["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            seed=job.get("first_seed", 0) + index,
        )
        for index in range(len(job["prompts"]))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counts = {m.name: m.value for m in llm.get_metrics() if m.name in COUNTS}
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "blocks": blocks,
        **{COUNTS[name]: value for name, value in counts.items()},
    }


def record_blocks() -> list[dict[str, Any]]:
    """Write down every block that the V2 runner's speculator, of either route, proposes."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    blocks: list[dict[str, Any]] = []
    propose = DFlashSpeculator.propose

    @wraps(propose)
    def recorded(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, input_batch, *args, **kwargs)
        for row, request in enumerate(input_batch.req_ids[: input_batch.num_reqs]):
            anchor = row * self.num_query_per_req
            blocks.append(
                {
                    "speculator": type(self).__name__,
                    "prompt": int(request.split("-")[0]),
                    "anchor": int(self.input_buffers.input_ids[anchor]),
                    "position": int(self.input_buffers.positions[anchor]),
                    "drafts": drafts[row].tolist(),
                }
            )
        return drafts

    DFlashSpeculator.propose = recorded
    return blocks


def leave_out_salts(names: Collection[str]) -> None:
    """Without vLLM's own, drafts are drawn as up to 0.28: with the noise of what replaces them."""
    import triton.language as tl
    from vllm.v1.worker.gpu.sample import gumbel

    from domino_spec.plugins.vllm import dflash

    if "vllm" in names:
        assert gumbel._DRAFT_NOISE_SALT.value, "vLLM keeps its salt elsewhere: mend this test"
        gumbel._DRAFT_NOISE_SALT = tl.constexpr(0)
    if "ours" in names:
        dflash.salt_drafts = lambda _: None


if __name__ == "__main__":
    v2_on_cpu.install()
    serve(work, imported=IMPORTED)
