"""One vLLM engine in a process of its own, which does load jobs as they come.

The first line of standard input is the engine's arguments, each further line a job; each is
answered by one line on standard output (whatever vLLM writes there goes to standard error). A job
keeps `concurrency` requests in flight until none is left to add, and counts the tokens of the time
in which that many were.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

COUNTERS = {
    "cycles": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


class Load:
    """Requests that take each other's place in an engine."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine = llm.llm_engine
        self.waiting = list(enumerate(job["prompts"]))[::-1]
        self.answers: list[list[int]] = [[] for _ in job["prompts"]]
        self.concurrency = job["concurrency"]
        self.options = {
            "temperature": job.get("temperature", 0.0),
            "max_tokens": job["tokens"],
            "ignore_eos": job.get("ignore_eos", False),
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        self.make_params = SamplingParams
        self.running = 0
        self.full_s = 0.0
        """Seconds for which the engine had all the requests it may have."""
        self.full_tokens = 0
        self.prompt_tokens = sum(len(prompt) for prompt in job["prompts"])

    def run(self) -> dict[str, Any]:
        """All requests to their end."""
        start = time.perf_counter()
        self._fill()
        while self.running:
            full = self.running == self.concurrency
            tokens = self._step()
            if full:
                self.full_tokens += tokens
                self.full_s = time.perf_counter() - start
            self._fill()
        return {
            "seconds": time.perf_counter() - start,
            "tokens": sum(map(len, self.answers)),
            "full_seconds": self.full_s,
            "full_tokens": self.full_tokens,
            "prompt_tokens": self.prompt_tokens,
        }

    def _fill(self) -> None:
        while self.waiting and self.running < self.concurrency:
            index, prompt = self.waiting.pop()
            params = self.make_params(**self.options, seed=index)
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            self.running += 1

    def _step(self) -> int:
        tokens = 0
        for output in self.engine.step():
            new = output.outputs[0].token_ids
            self.answers[int(output.request_id.split("-")[0])].extend(new)
            tokens += len(new)
            self.running -= output.finished
        return tokens


def counts(llm: Any) -> dict[str, int]:
    """What the engine has counted since it started."""
    found = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {name: int(found.get(metric) or 0) for name, metric in COUNTERS.items()}


def take_output() -> TextIO:
    """Standard output for us alone: from here on, vLLM and its processes write to the log."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def main() -> None:
    """Build the engine, then answer one job after the other."""
    output = take_output()

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=output, flush=True)

    settings = json.loads(sys.stdin.readline())
    if settings.pop("interpreted", False):
        from tests.engines.vllm import v2_on_cpu

        v2_on_cpu.install()
    start = time.perf_counter()
    import vllm

    llm = vllm.LLM(**settings, disable_log_stats=False)
    answer({"vllm": vllm.__version__, "start_seconds": time.perf_counter() - start})
    for line in sys.stdin:
        job = json.loads(line)
        before = counts(llm)
        load = Load(llm, job)
        result = load.run()
        after = counts(llm)
        result |= {name: after[name] - before[name] for name in COUNTERS}
        if job.get("answers"):
            result["answers"] = load.answers
        answer(result)


if __name__ == "__main__":
    main()
