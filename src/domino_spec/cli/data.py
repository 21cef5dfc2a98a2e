"""`domino data`: look at training data, let the target make up prompts and answer them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import QUIET, ChatOptions, TargetArgument, load_decoder, require_places
from domino_spec.data.settings import AnswerSettings, SynthSettings
from domino_spec.settings import DraftOptions, Settings, TargetOptions, Thinking, setting

if TYPE_CHECKING:
    from domino_spec.checkpoints import TargetFacts
    from domino_spec.data.answer import Answerer, AnswerProgress
    from domino_spec.data.synth import SynthProgress

data_app = typer.Typer(no_args_is_help=True, help="Training data: check, make up, answer.")

OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="The folder to write to; a begun one is gone on with.")
]
BatchOption = Annotated[
    int, typer.Option(help="Sequences at a time, where the engine cannot run the target.")
]


class CheckSettings(Settings):
    """How data are read."""

    max_length: int = setting(2048, "cut conversations here")
    limit: int | None = setting(None, "read this many conversations")
    messages_field: str | None = setting(None, "the field of the messages, if not called as usual")
    text_field: str | None = setting(None, "the field of the text, if not called text")
    row_length: int = setting(1024, "pack into rows of this length")
    thinking: Thinking = None


@data_app.command()
@command()
def check(
    voice: Voice,
    target: TargetArgument,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="Files, folders, globs or hf:name[:split]."),
    ],
    *,
    settings: CheckSettings,
    target_options: TargetOptions,
) -> None:
    """Read training data as training would, and say what is in it and what is left out."""
    require_places(voice, target, target_options.revision, data=sources)

    from domino_spec.data import PackedBatches, load_corpus

    chat, length = ChatOptions(thinking=settings.thinking), settings.row_length
    facts, tokenizer = _without_weights(target, target_options, chat)
    with voice.working("reading"):
        corpus = load_corpus(
            sources,
            tokenizer=tokenizer,
            vocab_size=facts.vocab_size,
            chat_options=chat.template_options(),
            **settings.model_dump(exclude={"row_length", "thinking"}),
        )
        packed = PackedBatches(corpus, rows=1, length=length, seed=0, pad_token=0)
    if voice.as_json:
        packing = {
            "row_length": length,
            "rows": packed.batches_per_epoch,
            "padding_share": packed.padding_share,
            "cut": packed.cut,
        }
        report = asdict(corpus.report)
        voice.document({**report, "fingerprint": corpus.fingerprint, "packing": packing})
        return
    for line in (*corpus.report.lines(), *corpus.report.bad.lines()):
        voice.say(line)
    voice.say(
        f"packed: {packed.batches_per_epoch:,} rows of {length}, "
        f"{packed.padding_share:.1%} padding, {packed.cut:,} cut"
    )


@data_app.command()
@command(quiet=QUIET)
def synth(
    voice: Voice,
    target: TargetArgument,
    *,
    out: OutOption,
    count: Annotated[int, typer.Option("--count", "-n", help="How many prompts in all.")],
    settings: SynthSettings,
    batch_size: BatchOption = 32,
    draft_options: DraftOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> None:
    """Let the target make up prompts: no data from outside are needed.

    It writes the user's part of its own chat template; without a template the first --max-tokens
    tokens of texts, for `domino data answer` to continue. Repeated prompts and loops are dropped.
    """
    require_places(voice, target, target_options.revision, draft=draft_options, out=out)

    from domino_spec.data.folder import target_identity
    from domino_spec.data.synth import synthesise
    from domino_spec.evaluation import fingerprint

    decoder = load_decoder(voice, target, target_options, draft_options, chat, unpacks=True)
    with voice.ticker() as say:
        done = synthesise(
            decoder,
            out,
            settings,
            count=count,
            batch_size=batch_size,
            system=chat.system,
            identity=target_identity(fingerprint(decoder.target), decoder.facts()),
            on_progress=lambda progress: say(prompts_so_far(progress)),
        )
    _finish(voice, out, f"{done.prompts:,} prompts", done)


@data_app.command()
@command(quiet=QUIET)
def answer(
    voice: Voice,
    target: TargetArgument,
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPTS", help="JSONL or text files, folders, globs or hf:name."),
    ],
    *,
    out: OutOption,
    settings: AnswerSettings,
    limit: Annotated[int | None, typer.Option(help="Answer this many prompts.")] = None,
    batch_size: BatchOption = 32,
    server: Annotated[
        str | None, typer.Option(help="Ask an OpenAI-compatible server instead: its URL.")
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="The target's name there; unset: the first it serves.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.")] = 32,
    api_key_env: Annotated[
        str, typer.Option(help="The environment variable with the server's key, if it wants one.")
    ] = "OPENAI_API_KEY",
    draft_options: DraftOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> None:
    """Let the target answer prompts, as training data for its drafter.

    Run it again to go on after an interruption: finished parts are not answered again.
    """
    revision = target_options.revision
    require_places(voice, target, revision, draft=draft_options, prompts=prompts, out=out)

    from domino_spec.data.answer import LocalAnswerer, answer_prompts, estimate
    from domino_spec.data.folder import target_identity
    from domino_spec.data.prompts import read_prompts
    from domino_spec.data.server import ServerAnswerer
    from domino_spec.evaluation import fingerprint

    read = read_prompts(prompts, limit=limit, system=chat.system)
    for line in read.bad.lines():
        voice.warn(line)
    answerer: Answerer
    if server is None:
        decoder = load_decoder(voice, target, target_options, draft_options, chat, unpacks=True)
        answerer, facts = LocalAnswerer(decoder, batch_size=batch_size), decoder.facts()
        who, model = "the target", fingerprint(decoder.target)
    else:
        facts, tokenizer = _without_weights(target, target_options, chat)
        answerer = asked = ServerAnswerer(
            server,
            tokenizer=tokenizer,
            chat_options=chat.template_options(),
            model=server_model,
            api_key=os.environ.get(api_key_env),
            concurrency=concurrency,
        )
        who, model = f"a server's {asked.model}", target
    tokens, size = estimate(read, answerer, settings)
    voice.note(
        f"{len(read.rows):,} prompts: at most {tokens:,} tokens, {decimal(size)}; the first batch "
        "tells how long it takes"
    )
    with voice.ticker() as say:
        done = answer_prompts(
            read,
            answerer,
            out,
            settings,
            vocab_size=facts.vocab_size,
            identity={**target_identity(model, facts), "answered_by": who},
            on_progress=lambda progress: say(answers_so_far(progress)),
        )
    said = f"{done.answered:,} answers to {done.prompts:,} prompts"
    _finish(voice, out, said, done)
    if not done.answered:
        voice.error(
            f"no prompt was answered ({done.dropped_reasons()}), so {out} holds no training "
            "data; expected at least one answer. Change the prompts or the settings and write "
            "to another folder."
        )
        raise typer.Exit(1)


def _without_weights(
    target: str, options: TargetOptions, chat: ChatOptions
) -> tuple[TargetFacts, Any | None]:
    from domino_spec.api import read_target_facts
    from domino_spec.targets import load_tokenizer

    place: dict[str, Any] = {
        "revision": options.revision, "trust_remote_code": options.trust_remote_code,
        "weights": options.quantize != "keep",
    }  # fmt: skip
    facts = read_target_facts(target, thinking=chat.thinking, **place)
    return facts, load_tokenizer(target, **place)


def prompts_so_far(progress: SynthProgress) -> str:
    """How far making up prompts is."""
    return (
        f"{progress.prompts:,} of {progress.wanted:,} prompts from {progress.candidates:,} "
        "candidates"
    )


def answers_so_far(progress: AnswerProgress) -> str:
    """How far answering is, and what is ahead."""
    text = f"{progress.done:,} of {progress.prompts:,} prompts answered"
    seconds, size = progress.seconds_left, progress.bytes_left
    if seconds is None or size is None:
        return text
    rate = progress.session_tokens / max(progress.session_seconds, 1e-9)
    return f"{text} · {rate:,.0f} tok/s · about {_duration(seconds)} and {decimal(int(size))} to go"


def _finish(voice: Voice, out: Path, said: str, done: SynthProgress | AnswerProgress) -> None:
    size = sum(path.stat().st_size for path in out.glob("part-*"))
    if voice.as_json:
        folder = {"folder": str(out), "bytes": size}
        voice.document({**folder, **vars(done), "warnings": voice.warnings})
        return
    voice.say(f"{said} in {out} ({decimal(size)})")
    for reason, count in done.dropped.items():
        voice.note(f"{count:,} dropped: {reason}")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
