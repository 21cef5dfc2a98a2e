"""One command line for every backend, and the refusals that backends share."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Gt, Le
from pydantic import Field, PositiveInt, model_validator

from domino_spec.errors import InputError
from domino_spec.serving.config import (
    LOOPBACK,
    ReasoningParserName,
    ServerConfig,
    ToolCallParserName,
)
from domino_spec.settings import DraftOptions, TargetOptions, Thinking, setting

GGUF_SUFFIX = ".gguf"
CONFIG_OPTION = "--config"
_OPTIONS = {
    "api_keys": "--api-key",
    "speculate": "--no-speculate",
    "target": "TARGET",
    "extra_args": "options after --",
}
_NATIVE_PACKAGES = ("fastapi", "prometheus_client", "pydantic", "uvicorn")
_NATIVE_LACKS = {
    "tensor_parallel": "it runs on one device; use --backend vllm or sglang, or spread the target "
    "with --device-map",
    "memory_share": "it takes what --slots and --context need; set these",
    "engine_python": "it runs in this Python; drop it",
    "extra_args": "it has no other command line; see domino serve --help for its options",
}


_server = partial(setting, group="Server")
_limit = partial(setting, group="Limits (unset: the backend's own)")
_backend = partial(setting, group="Engines")


class ServeArgs(DraftOptions, TargetOptions):
    """Arguments of `domino serve`; None leaves a choice to the backend.

    A backend translates every field or refuses it by name; a test goes through them all.
    """

    target: str = setting(..., "the target model: a folder, a GGUF file or a hub id", argument="")
    extra_args: tuple[str, ...] = setting(
        (),
        "`vllm`, sglang: whatever follows -- goes to its own command line as it is",
        argument="-- ARGS",
    )
    speculate: bool = setting(True, "without it the drafter is left out, to compare with")
    thinking: Thinking = None

    host: str = _server(LOOPBACK, "the address to listen at; 0.0.0.0 lets the network in")
    port: int = _server(8000, "`native`: 0 takes a free one")
    model_name: str | None = _server(
        None, "what clients call the model", unset="the target's short name"
    )
    api_keys: tuple[str, ...] = Field((), repr=False)
    allowed_origins: tuple[str, ...] = _server(
        (), "a site whose pages may ask, such as https://chat.example, or *; repeatable"
    )
    strict: bool = _server(False, "`native`: refuse unknown fields of requests")
    page: bool | None = _server(None, "`native`: the chat page at /", unset="it is shown")

    tool_call_parser: ToolCallParserName | None = _server(
        None, "`native`: the format of calls of tools", unset="what the chat template teaches"
    )
    reasoning_parser: ReasoningParserName | None = _server(
        None, "`native`: how reasoning is marked", unset="think where the chat template knows it"
    )

    slots: int | None = _limit(None, "answers decoded together")
    context: int | None = _limit(None, "tokens of prompt and answer together")
    max_prompt_tokens: int | None = _limit(None, "of one prompt")
    max_new_tokens: int | None = _limit(None, "of one answer")
    max_choices: int | None = _limit(None, "answers to one request")
    max_queue: int | None = _limit(None, "answers that may wait for a slot")
    max_body_bytes: int | None = _limit(None, "of one request")
    max_image_bytes: int | None = _limit(None, "of one image's file")
    max_image_pixels: int | None = _limit(None, "of all images of a request")
    drain_seconds: float | None = _limit(
        None, "how long answers may go on after the server was told to stop"
    )

    pack: bool | None = _backend(
        None,
        "`native`, on a CPU: keep a second copy of the weights in the order it multiplies fastest",
        unset="yes",
    )
    tensor_parallel: PositiveInt | None = _backend(
        None, "`vllm`, sglang: GPUs to cut the target over"
    )
    memory_share: Annotated[float, Gt(0), Le(1)] | None = _backend(
        None, "`vllm`, sglang: the part of a GPU's memory to take, for weights and cache together"
    )
    engine_python: str | None = _backend(
        None,
        "`vllm`, sglang: the Python it is installed with",
        unset="this one, or that of the command on the PATH",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.extra_args and not self.extra_args[0].startswith("-"):
            raise InputError(
                f"{self.extra_args[0]!r} follows the target; expected options, or -- and what the "
                "backend's own command line is to be given."
            )
        if self.draft is None:
            idle = [
                option(name)
                for name in (
                    "draft_revision",
                    "shift_label",
                    "depth",
                    "tree",
                    "candidates",
                    "draft_window",
                    "draft_sinks",
                )
                if getattr(self, name) is not None
            ]
            if idle:
                raise InputError(f"{', '.join(idle)} without --draft; name the drafter, or drop.")
        self.config()
        return self

    @property
    def name(self) -> str:
        """By which clients call the model: --model-name, or the target's own short name."""
        if self.model_name is not None:
            return self.model_name
        path = Path(self.target).expanduser()
        name = path.resolve().name if path.exists() else self.target.rstrip("/").split("/")[-1]
        return name.removesuffix(GGUF_SUFFIX) or self.target

    @property
    def drafter(self) -> str | None:
        """The drafter that is to be used, if any."""
        return self.draft if self.speculate else None

    def config(self) -> ServerConfig:
        """For the native server; also what checks the values for every other one."""
        given = {name: getattr(self, name, None) for name in ServerConfig.model_fields}
        chosen = {name: value for name, value in given.items() if value is not None}
        return ServerConfig(**{**chosen, "model": self.name})

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        fields = type(self).model_fields
        return {name: value for name, value in self if value != fields[name].default}


def option(name: str) -> str:
    """How the command line spells a field."""
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def refuse_fields(args: ServeArgs, backend: str, instead: Mapping[str, str]) -> None:
    """Refuse what a backend lacks, each by its name and with what to do instead."""
    wrong = [f"{option(name)} ({instead[name]})" for name in args.given() if name in instead]
    if wrong:
        raise InputError(f"--backend {backend} has no {', no '.join(wrong)}.")


def refuse_native(args: ServeArgs) -> None:
    """What the native server lacks."""
    refuse_fields(args, "native", _NATIVE_LACKS)


def require_native_packages() -> None:
    """Say what to install before a large target is loaded."""
    missing = [name for name in _NATIVE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"the server needs {', '.join(missing)}, which is not installed; run pip install "
            "'domino-spec[serve]'."
        )
