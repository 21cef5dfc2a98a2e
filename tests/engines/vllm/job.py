"""A vLLM engine for a test, in a process of its own.

A job has `target`, `speculative` (or null for plain decoding), `prompts` (token ids), `sampling`,
`engine` (more arguments of `LLM`), `supported` (versions that the plugin is to take for supported),
and `record`, which also returns every block that was drafted.
"""

import multiprocessing
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from domino_spec.plugins.vllm import versions
from tests.support.forks import Forks, serve

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a thread each: two engines run

_COUNTERS = {
    "cycles": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
CACHE_BYTES = 1 << 19
"""A tiny model's cache for a sequence: by default whole gigabytes are filled with zeros."""
IMPORTED = ["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "compressed_tensors"]
"""What every engine needs, and takes seconds to import."""
_OF_TORCHVISION = ("io", "transforms", "transforms.v2", "transforms.v2.functional")
_FORKS = Forks(__name__)
_KEPT: list[Any] = []


def run_job(**job: Any) -> dict[str, Any]:
    """Run a job in another process and return its result; what it said is shown if it fails."""
    return _FORKS.run(job)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What the job wants, in this process."""
    from vllm import LLM, SamplingParams

    inspect_here()
    if job.get("without_torchvision"):
        _stand_in_for_torchvision()
    if "supported" in job:
        versions.SUPPORTED = tuple(map(tuple, job["supported"]))
    plain: dict[str, Any] = {
        "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32",
        "max_model_len": 256, "kv_cache_memory_bytes": 32 * CACHE_BYTES,
    }  # fmt: skip
    two_ranks = "tensor_parallel_size" in job.get("engine", {})
    if two_ranks:
        _fork_ranks()
    engine = LLM(
        job["target"],
        speculative_config=job.get("speculative"),
        disable_log_stats=False,
        **{**plain, **job.get("engine", {})},
    )
    if not two_ranks:
        keep(engine)
    if job.get("record"):
        engine.collective_rpc(_record)
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **job.get("sampling", {})})
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = []
    for _ in range(job.get("rounds", 1)):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answers.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    counts = {name: metrics.get(metric) or 0 for name, metric in _COUNTERS.items()}
    ranks = engine.collective_rpc(_recorded) if job.get("record") else [[]]
    assert all(blocks == ranks[0] for blocks in ranks), "every rank drafts the same"
    return {"answers": answers, "blocks": ranks[0], **counts}


def inspect_here() -> None:
    """vLLM looks at each model's class in a new process, ten seconds each, to keep off CUDA."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _stand_in_for_torchvision() -> None:
    """Modules that also read images import it with their text models, which never call it."""

    class StandIn(ModuleType):
        __path__: list[str] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("torchvision", *(f"torchvision.{part}" for part in _OF_TORCHVISION)):
        sys.modules[name] = StandIn(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)


def keep(engine: Any) -> None:
    """It ends with its process, and not before in two seconds of collecting garbage."""
    _KEPT.append(engine)


def _fork_ranks() -> None:
    """On CPUs vLLM spawns its ranks; each would import it anew, and compile one small function."""
    import torch._dynamo
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    torch._dynamo.config.disable = True


def _record(worker: Any) -> None:
    """Keep each block that a worker drafts: its anchor, then its drafts."""
    from domino_spec.plugins.vllm.dflash import DominoForDFlash

    compute = DominoForDFlash.compute_logits
    blocks: list[list[int]] = []

    def recording(self: Any, hidden: Any) -> Any:
        logits = compute(self, hidden)
        drafts = logits.argmax(dim=-1).view(-1, self.drafts)
        anchors = self._tokens.view(-1)[:: self.drafts + 1][: len(drafts)]
        blocks.extend([int(a), *map(int, row)] for a, row in zip(anchors, drafts, strict=True))
        return logits

    DominoForDFlash.compute_logits = recording
    worker.drafted_blocks = blocks


def _recorded(worker: Any) -> list[list[int]]:
    blocks: list[list[int]] = worker.drafted_blocks
    return blocks


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    serve(work, imported=IMPORTED)
