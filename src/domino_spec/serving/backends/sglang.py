"""`domino serve` as `python -m sglang.launch_server` takes it. Which flags matter: docs/serving.md.

Drafters are exported in SGLang's own form, which needs no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from domino_spec.checkpoints.layouts import DFLASH_ARCHITECTURE
from domino_spec.errors import InputError
from domino_spec.plugins.sglang.versions import SUPPORTED, is_too_old, problem
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

EXACT_POOL = 0
"""SGLang's default drafts from a pool of candidates: other drafts than the drafter's."""
EARLY_STATES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Targets whose hidden states SGLang captures a layer too early."""
EARLY_STATES_IN = "0.5.20"
"""The release in which that was seen."""


class SGLangBackend(Backend):
    """SGLang, which runs a Domino head by itself, in bfloat16."""

    name, title = "sglang", "SGLang"
    distributions = ("sglang",)
    plugins = "sglang.srt.plugins"
    first, newest = (".".join(map(str, end)) for end in SUPPORTED)
    install = f"pip install 'sglang>={first},<={newest}'"
    form, architectures, plugin_reads = "sglang", (DFLASH_ARCHITECTURE,), False
    draft_dtype = "bfloat16"
    lacking = MappingProxyType({
        "candidates": "SGLang's pool is shared by a block, which is another thing: "
        "-- --speculative-domino-candidate-pool-size N",
        "draft_window": "SGLang's drafter reads what its own configuration says; drop it",
        "draft_sinks": "SGLang's drafter reads what its own configuration says; drop it",
        "remeasure": "SGLang chooses no depth by cost; drop it",
        "tree": "SGLang verifies chains of a Domino or DFlash drafter; drop it",
        "max_new_tokens": "--context bounds prompt and answer together",
        "max_choices": "let --slots and --max-queue bound what is asked for at once",
        "allowed_origins": "SGLang lets the pages of every site ask, whatever is said",
        "drain_seconds": "told to stop, SGLang ends the answers that run, however long it takes",
    })  # fmt: skip
    keys_in_config = 1

    def refuse(self, args: ServeArgs) -> None:
        """What SGLang has no word for."""
        super().refuse(args)
        if len(args.api_keys) > 1:
            raise InputError(
                f"--backend sglang takes one key, {len(args.api_keys)} were given; give one, or "
                "let a proxy before it know them all."
            )
        if args.drafter is not None and args.device == "cpu":
            raise InputError(
                "--backend sglang has no --device cpu with a drafter: its Domino needs CUDA. Serve "
                "with --backend native, or without one (--no-speculate)."
            )

    def check_version(self, version: str) -> list[str]:
        """Old ones are refused; of new ones it is said that they were never tried."""
        wrong = problem(version)
        if wrong is not None and is_too_old(version):
            raise InputError(wrong)
        return [] if wrong is None else [wrong]

    def warnings(self, args: ServeArgs) -> list[str]:
        """Without a key it is open to every page."""
        if not args.api_keys:
            return ["SGLang answers the pages of every site that a browser here opens; set a key."]
        return []

    def command(
        self,
        args: ServeArgs,
        found: Installed,
        draft: ServedDraft | None,
        environment: Mapping[str, str],  # noqa: ARG002 (as every backend's)
    ) -> Launch:
        """A key goes into a private file, since there is no other way but argv."""
        keys, on_cpu = args.api_keys, args.device == "cpu"
        values: dict[str, object] = {
            "--model-path": args.target,
            "--served-model-name": args.name,
            "--revision": args.revision,
            "--dtype": args.dtype,
            "--device": args.device and args.device.partition(":")[0],
            "--base-gpu-id": None if on_cpu else gpu_index(args),
            "--trust-remote-code": args.trust_remote_code,
            "--default-chat-template-kwargs": template_options(args),
            "--host": args.host,
            "--port": args.port,
            "--enable-metrics": True,
            "--max-running-requests": args.slots,
            "--max-queued-requests": args.max_queue,
            "--context-length": args.context,
            "--tp-size": args.tensor_parallel,
            "--mem-fraction-static": args.memory_share,
        }
        if draft is not None:
            _refuse_early_states(draft, found)
            values["--speculative-algorithm"] = "DFLASH"
            values["--speculative-draft-model-path"] = draft.folder
            if draft.config.head is not None:
                if args.dtype in ("float32", "float16"):
                    raise InputError(
                        f"--dtype {args.dtype} was given, but SGLang runs a Domino head in "
                        "bfloat16 only; say --dtype bfloat16, or drop it for a target that is "
                        "bfloat16."
                    )
                values["--speculative-domino-candidate-pool-size"] = EXACT_POOL
            if args.depth is not None:  # SGLang counts the slots of the block, anchor included
                drafts = draft.depth(args.depth, self.title)
                values["--speculative-num-draft-tokens"] = drafts + 1
        return Launch(
            argv=(
                found.python, "-m", "sglang.launch_server", *options(values), *args.extra_args,
            ),
            secret_config={"api-key": keys[0]} if keys else {},
            prints=keys,
        )  # fmt: skip


def _refuse_early_states(draft: ServedDraft, found: Installed) -> None:
    names = set(draft.target_architectures).intersection(EARLY_STATES)
    if names and found.version == EARLY_STATES_IN:
        raise InputError(
            f"SGLang {found.version} captures the hidden states of {names.pop()} one layer too "
            "early (sgl-project/sglang#38096): drafts would be made of other states than the "
            "drafter learnt from. Serve the checkpoint that has its vision tower, or use --backend "
            "vllm or native."
        )


BACKEND = SGLangBackend()
