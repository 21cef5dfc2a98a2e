"""Options of `domino serve` that no other command has."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from domino_spec.errors import InputError

KEY_VARIABLE = "DOMINO_API_KEY"
_SERVER = "Server"
_LIMITS = "Limits (unset: the backend's own)"
_ENGINES = "Engines"
_CHAT = "Chat template"
_COMMENT = "#"


class BackendName(StrEnum):
    """What answers."""

    NATIVE = "native"
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where it listens, and to whom."""

    host: Annotated[
        str,
        typer.Option(
            help="The address to listen at; 0.0.0.0 lets the network in.", rich_help_panel=_SERVER
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="native: 0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000
    model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model; unset: the target's short name.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        list[str],
        typer.Option(
            help=f"Only who has such a key may ask; repeatable. Seen by whoever lists processes: "
            f"better {KEY_VARIABLE} in the environment, or --api-key-file.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one key a line.", rich_help_panel=_SERVER)
    ] = None
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="native: the chat page at /; unset: it is shown.",
            rich_help_panel=_SERVER,
        ),
    ] = None

    def keys(self) -> tuple[str, ...]:
        """All keys from all places, each once."""
        found = [*self.api_key]
        if self.api_key_file is not None:
            found += _keys_in(self.api_key_file)
        if os.environ.get(KEY_VARIABLE):
            found.append(os.environ[KEY_VARIABLE])
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """How much may be asked for."""

    slots: Annotated[
        int | None, typer.Option(help="Answers decoded together.", rich_help_panel=_LIMITS)
    ] = None
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer together.", rich_help_panel=_LIMITS),
    ] = None
    max_prompt_tokens: Annotated[int | None, typer.Option(rich_help_panel=_LIMITS)] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of one answer.", rich_help_panel=_LIMITS)
    ] = None
    max_choices: Annotated[
        int | None, typer.Option(help="Answers to one request.", rich_help_panel=_LIMITS)
    ] = None
    max_queue: Annotated[
        int | None,
        typer.Option(help="Answers that may wait for a slot.", rich_help_panel=_LIMITS),
    ] = None
    max_body_bytes: Annotated[
        int | None, typer.Option(help="Of one request.", rich_help_panel=_LIMITS)
    ] = None
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            help="How long answers may go on after the server was told to stop.",
            rich_help_panel=_LIMITS,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What only some backends know."""

    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="native, on a CPU: keep a second copy of the weights in the order it multiplies "
            "fastest; unset: yes.",
            rich_help_panel=_ENGINES,
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="vllm, sglang: GPUs to cut the target over.", rich_help_panel=_ENGINES),
    ] = None
    memory_share: Annotated[
        float | None,
        typer.Option(
            help="vllm, sglang: the part of a GPU's memory to take.", rich_help_panel=_ENGINES
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        typer.Option(
            help="vllm, sglang: the Python beside which it is installed; unset: this one, or that "
            "of the command on the PATH.",
            rich_help_panel=_ENGINES,
        ),
    ] = None


ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Switch a template that knows enable_thinking; unset: its own default.",
        rich_help_panel=_CHAT,
    ),
]


def _keys_in(path: Path) -> list[str]:
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--api-key-file {path} cannot be read ({type(error).__name__}); expected a text file "
            "with one key a line."
        ) from error
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith(_COMMENT)]
    if not keys:
        raise InputError(f"--api-key-file {path} holds no key; expected one a line.")
    return keys
