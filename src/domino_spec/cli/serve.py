"""`domino serve`: an OpenAI-compatible server on our own engine, on vLLM or on SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import (
    ChatOptions,
    LoopOptions,
    check_drafter,
    describe_target,
    load_decoder,
    require_places,
    target_arguments,
)
from domino_spec.errors import DominoError, InputError
from domino_spec.serving.backends.args import ServeArgs
from domino_spec.serving.config import ServerConfig

KEY_VARIABLE = "DOMINO_API_KEY"
_COMMENT = "#"
_WOULD_NOT_START = 2


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


@command(as_json=None)
def serve(
    voice: Voice,
    args: ServeArgs,
    *,
    backend: Annotated[
        Literal["native", "vllm", "sglang"],
        typer.Option(help="native is our own engine; the others are run with our drafter."),
    ] = "native",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all that can be checked without loading weights, say what would be run, "
            "and end: 0 if it would start, 2 if not.",
        ),
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only who has such a key may ask; repeatable. Visible in the list of processes: "
            f"better {KEY_VARIABLE} in the environment, or --api-key-file.",
            rich_help_panel="Server",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one key a line.", rich_help_panel="Server")
    ] = None,
) -> None:
    """Serve the target to OpenAI clients, at http://127.0.0.1:8000/v1 by default."""
    keys = [
        *(api_key or []),
        *([] if api_key_file is None else _keys_in(api_key_file)),
        *([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []),
    ]
    args = args.replace(api_keys=tuple(dict.fromkeys(keys)))
    try:
        if backend == "native":
            code = _serve_natively(voice, args, dry=dry_run)
        else:
            code = _serve_with(voice, args, backend, dry=dry_run)
    except DominoError as error:
        if not dry_run:
            raise
        voice.fail(error)
        code = _WOULD_NOT_START
    if code:
        raise typer.Exit(code)


def _serve_natively(voice: Voice, args: ServeArgs, *, dry: bool) -> int:
    from domino_spec.serving.backends.args import refuse_native, require_native_packages
    from domino_spec.serving.config import bind_sockets

    refuse_native(args)
    config = args.config()
    slots = "as many as the memory holds" if config.slots is None else str(config.slots)
    if dry:
        require_native_packages()
        _check(voice, args, config, native=True)
        _announce(voice, args, config, slots=slots)
        shown = {name: value for name, value in dict(config).items() if name != "api_keys"}
        shown["api_keys"] = f"{len(config.api_keys)}, not shown"
        for name, value in shown.items():
            voice.say(f"{name}: {'unset' if value is None else value}")
        return 0
    require_native_packages()
    sockets = bind_sockets(config)
    draft = args.model_copy(update={"draft": args.drafter})
    require_places(voice, args.target, args.revision, draft=draft)
    chat, loop = ChatOptions(thinking=args.thinking), LoopOptions(pack=args.pack is not False)
    decoder = load_decoder(voice, args.target, args, draft, chat, loop)
    _announce(voice, args, config, slots=slots)
    from domino_spec.serving.server import serve as serve_decoder

    return serve_decoder(decoder, config, sockets=sockets, draft_name=args.drafter, log=voice.note)


def _serve_with(voice: Voice, args: ServeArgs, name: str, *, dry: bool) -> int:
    from domino_spec.serving.backends import find_backend
    from domino_spec.serving.backends.drafts import write_draft
    from domino_spec.serving.backends.launch import plan, run

    backend = find_backend(name)
    if dry:
        backend.refuse(args)
        _check(voice, args, args.config(), native=False)
    launch, draft, warnings = plan(args, backend, environment=os.environ, dry=dry)
    for warning in warnings:
        voice.warn(warning)
    slots = f"as {backend.title} decides" if args.slots is None else str(args.slots)
    depth = None if draft is None else draft.depth(args.depth, backend.title)
    _announce(voice, args, args.config(), slots=slots, depth=depth)
    if draft is not None and not draft.is_own:
        what = f"{args.drafter} in the form that {backend.title} reads"
        if draft.is_there:
            voice.note(f"taking {what} from {draft.folder}, where it was exported before")
        elif dry:
            voice.note(f"{what} would be exported to {draft.folder} first")
        else:
            voice.note(f"exporting {what} to {draft.folder}; kept for the next time")
            write_draft(args, backend, draft)
    if dry:
        voice.say(launch.shown())
        return 0
    voice.note(launch.shown())
    return run(launch)


def _check(voice: Voice, args: ServeArgs, config: ServerConfig, *, native: bool) -> None:
    """Refuse all that a start would refuse, as far as it can be known without the weights."""
    from domino_spec.serving.config import bind_sockets

    for each in bind_sockets(config):
        each.close()
    draft = args.model_copy(update={"draft": args.drafter})
    require_places(voice, args.target, args.revision, draft=draft)
    if not native:
        return  # other backends have targets and devices of their own; drafters are checked there
    from domino_spec.serving.engine_setup import check_context

    described = describe_target(args.target, args)
    target_arguments(args)
    check_drafter(args.target, args, draft)
    check_context(config, described.context_length)
    voice.note(f"target:  {args.target} ({described.architecture})")
    if not described.has_chat_template:
        voice.warn(
            "the target has no chat template, so that chats will be refused; /v1/completions works."
        )


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
