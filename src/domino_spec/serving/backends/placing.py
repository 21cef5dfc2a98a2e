"""Refusals and placements that vLLM and SGLang share."""

from __future__ import annotations

from collections.abc import Mapping

from domino_spec.errors import InputError
from domino_spec.serving.backends.drafts import ServedDraft
from domino_spec.serving.backends.launch import CONFIG_OPTION
from domino_spec.serving.backends.request import GGUF_SUFFIX, ServeRequest

VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUDA = "cuda"


def refuse_ours(request: ServeRequest, name: str) -> None:
    """What only our own server and engine have."""
    if request.page:
        raise InputError(f"--backend {name} has no --page: the chat page is the native server's.")
    if request.dtype == "fastest":
        raise InputError(
            f"--backend {name} has no --dtype fastest, which measures our own engine; name a type."
        )


def drafts_of(request: ServeRequest, draft: ServedDraft, giver: str) -> int:
    """Drafts a cycle: the block less its anchor, or fewer."""
    most = draft.config.default_depth
    if request.depth is None:
        return most
    if not 1 <= request.depth <= most:
        raise InputError(
            f"depth is {request.depth}; {giver} gives 1 to {most} drafts a cycle with this drafter "
            f"(blocks of {draft.config.block_size}); for none use --no-speculate."
        )
    return request.depth


def refuse_gguf(request: ServeRequest, title: str) -> None:
    """Drafters tap ordinary weights there."""
    if request.target.endswith(GGUF_SUFFIX):
        raise InputError(
            f"{request.target} is a GGUF file; {title} is given a folder or a hub id here. Serve "
            "it with --backend native."
        )


def refuse_any_port(request: ServeRequest, title: str) -> None:
    """A free port would be found, but nobody told which."""
    if request.port == 0:
        raise InputError(f"port is 0, and {title} does not say which port it took; name one.")


def refuse_two_configs(request: ServeRequest, title: str, *, keys: int) -> None:
    """The engines read one file of options, and ours is needed for the keys."""
    if len(request.api_keys) >= keys and CONFIG_OPTION in request.passed_on:
        raise InputError(
            f"{CONFIG_OPTION} was passed on, but {title} reads one such file and is given the API "
            "key in another; set api-key in yours, and none here."
        )


def gpu_index(request: ServeRequest) -> int | None:
    """The N of cuda:N; None where no one GPU was named."""
    kind, _, index = (request.device or _CUDA).partition(":")
    if kind != _CUDA or (index and not index.isdecimal()):
        raise InputError(f"device is {request.device!r}; expected cuda or cuda:0, for example.")
    if index and (request.tensor_parallel or 1) > 1:
        raise InputError(
            f"--device {request.device} is one GPU, --tensor-parallel {request.tensor_parallel} "
            f"wants more; choose them with {VISIBLE} and drop --device."
        )
    return int(index) if index else None


def visible_gpu(request: ServeRequest, environment: Mapping[str, str]) -> dict[str, str]:
    """Shows the engine the one GPU that was named, by its number among those we see."""
    index = gpu_index(request)
    if index is None:
        return {}
    seen = [one.strip() for one in environment.get(VISIBLE, "").split(",") if one.strip()]
    if seen and index >= len(seen):
        raise InputError(f"device is {request.device!r} but {VISIBLE} shows {len(seen)} GPUs.")
    return {VISIBLE: seen[index] if seen else str(index)}
