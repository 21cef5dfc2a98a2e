"""`domino serve`: an OpenAI-compatible server on our own engine, on vLLM or on SGLang."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from domino_spec.cli.loading import load_decoder
from domino_spec.cli.loop_options import EngineName, LoopOptions
from domino_spec.cli.options import (
    ChatOptions,
    DraftOptions,
    NoSpeculateOption,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.places import checkpoints_among, require_places
from domino_spec.cli.serve_options import (
    BackendName,
    EngineOptions,
    LimitOptions,
    ListenOptions,
    ThinkingOption,
)
from domino_spec.cli.voice import Voice, speaking

if TYPE_CHECKING:
    from domino_spec.serving.backends import ServeRequest
    from domino_spec.serving.settings import ServerSettings


def serve(
    target: TargetArgument,
    passed_on: Annotated[
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
    """Serve the target to OpenAI clients, at http://127.0.0.1:8000/v1 unless told otherwise."""
    with speaking() as voice:
        from domino_spec.serving.backends import ServeRequest

        told = vars(listen).copy()
        del told["api_key"], told["api_key_file"]
        dtype = target_options.dtype
        request = ServeRequest(
            target=target,
            **{**vars(target_options), "dtype": None if dtype is None else dtype.value},
            **vars(draft_options),
            speculate=not no_speculate,
            thinking=thinking,
            **told,
            api_keys=listen.keys(),
            **vars(limits),
            **vars(engine_options),
            passed_on=tuple(passed_on or ()),
        )
        if backend is BackendName.NATIVE:
            code = _serve_natively(voice, request, target_options, draft_options, dry=dry_run)
        else:
            code = _serve_with(voice, request, backend, dry=dry_run)
        if code:
            raise typer.Exit(code)


def _serve_natively(
    voice: Voice,
    request: ServeRequest,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    *,
    dry: bool,
) -> int:
    from domino_spec.serving.backends import native
    from domino_spec.serving.listening import take_address

    native.refuse(request)
    settings = request.settings()
    slots = "as many as the memory holds" if settings.slots is None else str(settings.slots)
    if dry:
        _announce(voice, request, settings, slots=slots)
        shown = {name: value for name, value in asdict(settings).items() if name != "api_keys"}
        shown["api_keys"] = f"{len(settings.api_keys)}, not shown"
        for name, value in shown.items():
            voice.out.print(f"{name}: {'unset' if value is None else value}", soft_wrap=True)
        return 0
    native.require_packages()
    sockets = take_address(settings)
    require_places(
        voice,
        request.target,
        revision=request.revision,
        drafts=checkpoints_among([request.drafter]),
        draft_revision=request.draft_revision,
    )
    decoder = load_decoder(
        voice,
        request.target,
        target_options,
        replace(draft_options, draft=request.drafter),
        ChatOptions(thinking=request.thinking),
        LoopOptions(engine=EngineName.AUTO, pack=request.pack is not False),
    )
    _announce(voice, request, settings, slots=slots)
    from domino_spec.serving.run import serve as serve_decoder

    return serve_decoder(
        decoder, settings, sockets=sockets, draft_name=request.drafter, said=voice.note
    )


def _serve_with(voice: Voice, request: ServeRequest, name: BackendName, *, dry: bool) -> int:
    from domino_spec.serving.backends import find_backend
    from domino_spec.serving.backends.drafts import write_draft
    from domino_spec.serving.backends.plan import plan
    from domino_spec.serving.backends.process import run

    backend = find_backend(name.value)
    planned = plan(request, backend, environment=os.environ, dry=dry)
    for warning in planned.warnings:
        voice.warn(warning)
    slots = f"as {backend.ENGINE.title} decides" if request.slots is None else str(request.slots)
    _announce(voice, request, request.settings(), slots=slots, depth=planned.depth)
    draft = planned.draft
    if draft is not None and not draft.is_own:
        what = f"{request.drafter} in the form that {backend.ENGINE.title} reads"
        if draft.is_there:
            voice.note(f"taking {what} from {draft.folder}, where it was exported before")
        elif dry:
            voice.note(f"{what} would be exported to {draft.folder} first")
        else:
            voice.note(f"exporting {what} to {draft.folder}; kept for the next time")
            write_draft(request, backend.NEEDS, draft)
    if dry:
        voice.out.print(planned.launch.shown(), soft_wrap=True)
        return 0
    voice.note(planned.launch.shown())
    return run(planned.launch)


def _announce(
    voice: Voice,
    request: ServeRequest,
    settings: ServerSettings,
    *,
    slots: str,
    depth: int | None = None,
) -> None:
    """Where, what, and who can reach it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = "a free port" if settings.port == 0 else settings.port
    voice.note(f"address: http://{host}:{port}/v1")
    voice.note(f"model:   {settings.model}")
    drafter = request.drafter
    if drafter is None:
        drafter = "none: " + ("--no-speculate" if request.draft else "no --draft was given")
    elif depth is not None:
        drafter += f", {depth} drafts a cycle"
    voice.note(f"drafter: {drafter}")
    voice.note(f"slots:   {slots}")
    asked = "with a key" if settings.api_keys else "without a key"
    if not settings.public:
        voice.note(f"reached: from this machine only, {asked}")
    elif settings.api_keys:
        voice.note(f"reached: from the network, {asked}")
    else:
        voice.warn(
            f"everybody whom the network lets reach {settings.host} may ask, since no API key is "
            "set; set DOMINO_API_KEY or --api-key-file, or listen at 127.0.0.1."
        )
