"""`domino serve` as `python -m sglang.launch_server` takes it. Which flags matter: docs/serving.md.

Drafters are exported in SGLang's own form, which needs no plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from domino_spec.checkpoints.exports import SGLANG_HEAD_DTYPE, sglang_config
from domino_spec.checkpoints.layouts import DFLASH_ARCHITECTURE
from domino_spec.errors import InputError
from domino_spec.plugins.sglang.versions import SUPPORTED, is_too_old, problem
from domino_spec.serving.backends.args import ServeArgs, gpu_index, refuse_foreign
from domino_spec.serving.backends.drafts import DraftNeeds, ServedDraft
from domino_spec.serving.backends.installed import Engine, Installed
from domino_spec.serving.backends.launch import Launch

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

_PASS = "pass SGLang's own after --, such as -- "
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


def refuse(args: ServeArgs) -> None:
    """What SGLang has no word for."""
    refuse_foreign(args, NAME, ENGINE.title, _LACKING, keys_in_config=1)
    if len(args.api_keys) > 1:
        raise InputError(
            f"--backend sglang takes one key, {len(args.api_keys)} were given; give one, or let "
            "a proxy before it know them all."
        )
    if args.drafter is not None and args.device == "cpu":
        raise InputError(
            "--backend sglang has no --device cpu with a drafter: its Domino needs CUDA. Serve "
            "with --backend native, or without one (--no-speculate)."
        )


def command(
    args: ServeArgs,
    found: Installed,
    draft: ServedDraft | None,
    environment: Mapping[str, str],  # noqa: ARG001 (as every backend's)
) -> Launch:
    """The command line; a key goes into a private file, since there is no other way but argv."""
    keys = args.api_keys
    return Launch(
        argv=(
            found.python, "-m", "sglang.launch_server", "--model-path", args.target,
            *_model(args),
            *_server(args),
            *([] if draft is None else _drafting(args, draft)),
            *args.extra_args,
        ),
        secret_config={"api-key": keys[0]} if keys else {},
        prints=keys,
    )  # fmt: skip


def warnings(args: ServeArgs) -> list[str]:
    """What to know about its safety."""
    if not args.api_keys:
        return ["SGLang answers the pages of every site that a browser here opens; set a key."]
    return []


def _model(args: ServeArgs) -> list[str]:
    words = ["--served-model-name", args.name]
    if args.revision is not None:
        words += ["--revision", args.revision]
    if args.dtype is not None:
        words += ["--dtype", args.dtype]
    if args.device == "cpu":
        words += ["--device", "cpu"]
    elif args.device is not None:
        index = gpu_index(args)
        words += ["--device", "cuda", *([] if index is None else ["--base-gpu-id", str(index)])]
    if args.trust_remote_code:
        words += ["--trust-remote-code"]
    if args.thinking is not None:
        told = json.dumps({"enable_thinking": args.thinking})
        words += ["--default-chat-template-kwargs", told]
    return words


def _server(args: ServeArgs) -> list[str]:
    words = ["--host", args.host, "--port", str(args.port), "--enable-metrics"]
    numbers = {
        "--max-running-requests": args.slots,
        "--max-queued-requests": args.max_queue,
        "--context-length": args.context,
        "--tp-size": args.tensor_parallel,
        "--mem-fraction-static": args.memory_share,
    }
    for name, value in numbers.items():
        if value is not None:
            words += [name, str(value)]
    return words


def _drafting(args: ServeArgs, draft: ServedDraft) -> list[str]:
    words = [
        "--speculative-algorithm",
        "DFLASH",
        "--speculative-draft-model-path",
        str(draft.folder),
    ]
    if draft.config.head is not None:
        if args.dtype in ("float32", "float16"):
            raise InputError(
                f"--dtype {args.dtype} was given, but SGLang runs a Domino head in bfloat16 "
                "only; say --dtype bfloat16, or drop it for a target that is bfloat16."
            )
        words += ["--speculative-domino-candidate-pool-size", str(EXACT_POOL)]
    if args.depth is not None:
        # SGLang counts the slots of the block, anchor included.
        words += ["--speculative-num-draft-tokens", str(draft.depth(args.depth, ENGINE.title) + 1)]
    return words
