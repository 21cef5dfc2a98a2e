"""`domino serve`: an OpenAI-compatible server on our own engine, on vLLM or on SGLang."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domino_spec.cli.loading import checkpoints_among, load_decoder, require_places
from domino_spec.cli.options import (
    ChatOptions,
    DraftOptions,
    EngineName,
    LoopOptions,
    NoSpeculateOption,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.voice import Voice, speaking
from domino_spec.errors import InputError

if TYPE_CHECKING:
    from domino_spec.serving.backends import ServeArgs
    from domino_spec.serving.config import ServerConfig


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
            help=f"Only who has such a key may ask; repeatable. Visible in the list of processes: "
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
            help="vllm, sglang: the Python it is installed with; unset: this one, or that "
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


def serve(
    target: TargetArgument,
    extra_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGS",
            help="vllm, sglang: whatever follows -- goes to its own command line as it is.",
            show_default=False,
        ),
    ] = None,
    *,
    backend: Annotated[
        BackendName,
        typer.Option(help="native is our own engine; the others are run with our drafter."),
    ] = BackendName.NATIVE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run, and end.")
    ] = False,
    no_speculate: NoSpeculateOption = False,
    draft_options: DraftOptions,
    listen: ListenOptions,
    limits: LimitOptions,
    thinking: ThinkingOption = None,
    target_options: TargetOptions,
    engine_options: EngineOptions,
) -> None:
    """Serve the target to OpenAI clients, at http://127.0.0.1:8000/v1 by default."""
    with speaking() as voice:
        from domino_spec.serving.backends import ServeArgs

        told = vars(listen).copy()
        del told["api_key"], told["api_key_file"]
        dtype = target_options.dtype
        args = ServeArgs(
            target=target,
            **{**vars(target_options), "dtype": None if dtype is None else dtype.value},
            **vars(draft_options),
            speculate=not no_speculate,
            thinking=thinking,
            **told,
            api_keys=listen.keys(),
            **vars(limits),
            **vars(engine_options),
            extra_args=tuple(extra_args or ()),
        )
        if backend is BackendName.NATIVE:
            code = _serve_natively(voice, args, target_options, draft_options, dry=dry_run)
        else:
            code = _serve_with(voice, args, backend, dry=dry_run)
        if code:
            raise typer.Exit(code)


def _serve_natively(
    voice: Voice,
    args: ServeArgs,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    *,
    dry: bool,
) -> int:
    from domino_spec.serving.backends.args import refuse_native, require_native_packages
    from domino_spec.serving.config import bind_sockets

    refuse_native(args)
    config = args.config()
    slots = "as many as the memory holds" if config.slots is None else str(config.slots)
    if dry:
        _announce(voice, args, config, slots=slots)
        shown = {name: value for name, value in asdict(config).items() if name != "api_keys"}
        shown["api_keys"] = f"{len(config.api_keys)}, not shown"
        for name, value in shown.items():
            voice.out.print(f"{name}: {'unset' if value is None else value}", soft_wrap=True)
        return 0
    require_native_packages()
    sockets = bind_sockets(config)
    require_places(
        voice,
        args.target,
        revision=args.revision,
        drafts=checkpoints_among([args.drafter]),
        draft_revision=args.draft_revision,
    )
    decoder = load_decoder(
        voice,
        args.target,
        target_options,
        replace(draft_options, draft=args.drafter),
        ChatOptions(thinking=args.thinking),
        LoopOptions(engine=EngineName.AUTO, pack=args.pack is not False),
    )
    _announce(voice, args, config, slots=slots)
    from domino_spec.serving.server import serve as serve_decoder

    return serve_decoder(decoder, config, sockets=sockets, draft_name=args.drafter, log=voice.note)


def _serve_with(voice: Voice, args: ServeArgs, name: BackendName, *, dry: bool) -> int:
    from domino_spec.serving.backends import find_backend
    from domino_spec.serving.backends.drafts import write_draft
    from domino_spec.serving.backends.launch import plan, run

    backend = find_backend(name.value)
    planned = plan(args, backend, environment=os.environ, dry=dry)
    for warning in planned.warnings:
        voice.warn(warning)
    slots = f"as {backend.ENGINE.title} decides" if args.slots is None else str(args.slots)
    _announce(voice, args, args.config(), slots=slots, depth=planned.depth)
    draft = planned.draft
    if draft is not None and not draft.is_own:
        what = f"{args.drafter} in the form that {backend.ENGINE.title} reads"
        if draft.is_there:
            voice.note(f"taking {what} from {draft.folder}, where it was exported before")
        elif dry:
            voice.note(f"{what} would be exported to {draft.folder} first")
        else:
            voice.note(f"exporting {what} to {draft.folder}; kept for the next time")
            write_draft(args, backend.NEEDS, draft)
    if dry:
        voice.out.print(planned.launch.shown(), soft_wrap=True)
        return 0
    voice.note(planned.launch.shown())
    return run(planned.launch)


def _announce(
    voice: Voice,
    args: ServeArgs,
    config: ServerConfig,
    *,
    slots: str,
    depth: int | None = None,
) -> None:
    """Where, what, and who can reach it."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = "a free port" if config.port == 0 else config.port
    voice.note(f"address: http://{host}:{port}/v1")
    voice.note(f"model:   {config.model}")
    drafter = args.drafter
    if drafter is None:
        drafter = "none: " + ("--no-speculate" if args.draft else "no --draft was given")
    elif depth is not None:
        drafter += f", {depth} drafts a cycle"
    voice.note(f"drafter: {drafter}")
    voice.note(f"slots:   {slots}")
    asked = "with a key" if config.api_keys else "without a key"
    if not config.public:
        voice.note(f"reached: from this machine only, {asked}")
    elif config.api_keys:
        voice.note(f"reached: from the network, {asked}")
    else:
        voice.warn(
            f"every client that can reach {config.host} may ask, since no API key is "
            "set; set DOMINO_API_KEY or --api-key-file, or listen at 127.0.0.1."
        )
