"""The request as `python -m sglang.launch_server` takes it. Which flags matter: docs/serving.md.

Drafters are exported in SGLang's own form, which needs no plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from domino_spec.checkpoints.exports import SGLANG_HEAD_DTYPE, sglang_config
from domino_spec.checkpoints.layouts import DFLASH_ARCHITECTURE
from domino_spec.errors import InputError
from domino_spec.plugins.sglang.versions import SUPPORTED, is_too_old, problem
from domino_spec.serving.backends.drafts import DraftNeeds, ServedDraft
from domino_spec.serving.backends.installed import Engine, Installed
from domino_spec.serving.backends.launch import Launch
from domino_spec.serving.backends.placing import (
    drafts_of,
    gpu_index,
    refuse_any_port,
    refuse_gguf,
    refuse_ours,
    refuse_two_configs,
)
from domino_spec.serving.backends.request import ServeRequest, refuse_fields

NAME = "sglang"
_FIRST, NEWEST = (".".join(map(str, end)) for end in SUPPORTED)
ENGINE = Engine(
    title="SGLang",
    command="sglang",
    distributions=("sglang",),
    plugins="sglang.srt.plugins",
    install=f"pip install 'sglang>={_FIRST},<={NEWEST}'",
    problem=problem,
    is_refused=is_too_old,
)
NEEDS = DraftNeeds(
    form="sglang",
    dtype=SGLANG_HEAD_DTYPE,
    config=sglang_config,
    architectures=(DFLASH_ARCHITECTURE,),
    plugin=False,
)
EXACT_POOL = 0
"""SGLang's default drafts from a pool of candidates: other drafts than the drafter's."""

_PASS = "pass SGLang's own behind --, such as -- "
_LACKING = {
    "device_map": "SGLang spreads a model with --tensor-parallel",
    "attn_implementation": _PASS + "--attention-backend NAME",
    "candidates": "SGLang's pool is shared by a block, which is another thing: "
    "-- --speculative-domino-candidate-pool-size N",
    "pack": "it is for our own engine on a CPU; drop it",
    "max_prompt_tokens": "--context bounds prompt and answer together",
    "max_new_tokens": "--context bounds prompt and answer together",
    "max_choices": "let --slots and --max-queue bound what is asked for at once",
    "max_body_bytes": "let a proxy before it bound the body",
    "drain_seconds": "told to stop, SGLang ends the answers that run, however long it takes",
}


def refuse(request: ServeRequest) -> None:
    """What SGLang has no word for."""
    refuse_fields(request, NAME, _LACKING)
    refuse_ours(request, NAME)
    if len(request.api_keys) > 1:
        raise InputError(
            f"--backend sglang takes one key, {len(request.api_keys)} were given; give one, or let "
            "a proxy before it know them all."
        )
    refuse_gguf(request, ENGINE.title)
    refuse_any_port(request, ENGINE.title)
    refuse_two_configs(request, ENGINE.title, keys=1)
    if request.drafter is not None and request.device == "cpu":
        raise InputError(
            "--backend sglang has no --device cpu with a drafter: its Domino needs CUDA. Serve "
            "with --backend native, or without one (--no-speculate)."
        )


def command(
    request: ServeRequest,
    found: Installed,
    draft: ServedDraft | None,
    environment: Mapping[str, str],  # noqa: ARG001 (as every backend's)
) -> Launch:
    """The command line; a key goes into a private file, since there is no other way but argv."""
    keys = request.api_keys
    return Launch(
        argv=(
            found.python, "-m", "sglang.launch_server", "--model-path", request.target,
            *_model(request),
            *_server(request),
            *([] if draft is None else _drafting(request, draft)),
            *request.passed_on,
        ),
        secret_config={"api-key": keys[0]} if keys else {},
        prints=keys,
    )  # fmt: skip


def cautions(request: ServeRequest) -> list[str]:
    """What to know about its safety."""
    if not request.api_keys:
        return ["SGLang answers the pages of every site that a browser here opens; set a key."]
    return []


def depth(request: ServeRequest, draft: ServedDraft) -> int:
    """Drafts a cycle."""
    return drafts_of(request, draft, "SGLang")


def _model(request: ServeRequest) -> list[str]:
    words = ["--served-model-name", request.name]
    if request.revision is not None:
        words += ["--revision", request.revision]
    if request.dtype is not None:
        words += ["--dtype", request.dtype]
    if request.device == "cpu":
        words += ["--device", "cpu"]
    elif request.device is not None:
        index = gpu_index(request)
        words += ["--device", "cuda", *([] if index is None else ["--base-gpu-id", str(index)])]
    if request.trust_remote_code:
        words += ["--trust-remote-code"]
    if request.thinking is not None:
        told = json.dumps({"enable_thinking": request.thinking})
        words += ["--default-chat-template-kwargs", told]
    return words


def _server(request: ServeRequest) -> list[str]:
    words = ["--host", request.host, "--port", str(request.port), "--enable-metrics"]
    numbers = {
        "--max-running-requests": request.slots,
        "--max-queued-requests": request.max_queue,
        "--context-length": request.context,
        "--tp-size": request.tensor_parallel,
        "--mem-fraction-static": request.memory_share,
    }
    for name, value in numbers.items():
        if value is not None:
            words += [name, str(value)]
    return words


def _drafting(request: ServeRequest, draft: ServedDraft) -> list[str]:
    words = [
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        str(draft.folder),
    ]
    if draft.config.head is not None:
        if request.dtype in ("float32", "float16"):
            raise InputError(
                f"--dtype {request.dtype} was given, but SGLang runs a Domino head in bfloat16 "
                "only; say --dtype bfloat16, or drop it for a target that is bfloat16."
            )
        words += ["--speculative-domino-candidate-pool-size", str(EXACT_POOL)]
    if request.depth is not None:
        # SGLang counts the slots of the block, anchor included.
        words += ["--speculative-num-draft-tokens", str(depth(request, draft) + 1)]
    return words
