"""`domino data`: look at training data, let the target make up prompts and answer them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.groups import grouped
from domino_spec.cli.loading import checkpoints_among, load_decoder, require_places
from domino_spec.cli.options import (
    ChatOptions,
    DraftOptions,
    JsonOption,
    QuietOption,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.voice import Voice, speaking
from domino_spec.data.settings import AnswerSettings, SynthSettings

if TYPE_CHECKING:
    from domino_spec.checkpoints import TargetFacts
    from domino_spec.data.answer import Answerer, AnswerProgress, Estimate
    from domino_spec.data.synth import SynthProgress

data_app = typer.Typer(no_args_is_help=True, help="Training data: check, make up, answer.")

_KEY_VARIABLE = "OPENAI_API_KEY"
_SECONDS_BETWEEN_LINES = 30.0
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="The folder to write to; a begun one is gone on with.")
]
BatchOption = Annotated[
    int, typer.Option(help="Sequences at a time, where the engine cannot run the target.")
]


def check(
    target: TargetArgument,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="Files, folders, globs or hf:name[:split]."),
    ],
    *,
    max_length: Annotated[int, typer.Option(help="Cut conversations here.")] = 2048,
    limit: Annotated[int | None, typer.Option(help="Read this many conversations.")] = None,
    messages_field: Annotated[
        str | None, typer.Option(help="The field of the messages, if not called as usual.")
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(help="The field of the text, if not called text.")
    ] = None,
    row_length: Annotated[int, typer.Option(help="Pack into rows of this length.")] = 1024,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Switch a template that knows enable_thinking; unset: its own default.",
        ),
    ] = None,
    target_options: TargetOptions,
    as_json: JsonOption = False,
) -> None:
    """Read training data as training would, and say what is in it and what is left out."""
    with speaking(as_json=as_json) as voice:
        require_places(voice, target, revision=target_options.revision, data=sources)

        from domino_spec.data import PackedBatches, load_corpus

        chat = ChatOptions(thinking=thinking)
        facts, tokenizer = _without_weights(target, target_options, chat)
        with voice.working("reading"):
            corpus = load_corpus(
                sources,
                tokenizer=tokenizer,
                vocab_size=facts.vocab_size,
                max_length=max_length,
                limit=limit,
                messages_field=messages_field,
                text_field=text_field,
                chat_options=chat.template_options(),
            )
            packed = PackedBatches(corpus, rows=1, length=row_length, seed=0, pad_token=0)
        if as_json:
            packing = {
                "row_length": row_length,
                "rows": packed.batches_per_epoch,
                "padding_share": packed.padding_share,
                "cut": packed.cut,
            }
            report = corpus.report.to_dict()
            voice.document({**report, "fingerprint": corpus.fingerprint, "packing": packing})
            return
        for line in corpus.report.lines():
            voice.out.print(line, soft_wrap=True)
        voice.out.print(
            f"packed: {packed.batches_per_epoch:,} rows of {row_length}, "
            f"{packed.padding_share:.1%} padding, {packed.cut:,} cut",
            soft_wrap=True,
        )


def synth(
    target: TargetArgument,
    *,
    out: OutOption,
    count: Annotated[int, typer.Option("--count", "-n", help="How many prompts in all.")],
    settings: SynthSettings,
    batch_size: BatchOption = 32,
    draft_options: DraftOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Let the target make up prompts: no data from outside are needed.

    It writes the user's part of its own chat template. Repeated prompts and loops are dropped.
    """
    with speaking(as_json=as_json, quiet=quiet) as voice:
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among([draft_options.draft]),
            draft_revision=draft_options.draft_revision,
            out=out,
        )

        from domino_spec.data.folder import target_identity
        from domino_spec.data.synth import synthesise
        from domino_spec.evaluation import fingerprint

        decoder = load_decoder(voice, target, target_options, draft_options, chat)
        with Ticker(voice) as ticker:
            done = synthesise(
                decoder,
                out,
                settings,
                count=count,
                batch_size=batch_size,
                system=chat.system,
                identity=target_identity(fingerprint(decoder.target), decoder.facts()),
                on_progress=lambda progress: ticker.say(prompts_so_far(progress)),
            )
        _finish(voice, out, f"{done.prompts:,} prompts", done.dropped, done.to_dict())


def answer(
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
    ] = _KEY_VARIABLE,
    draft_options: DraftOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Let the target answer prompts, as training data for its drafter.

    Run it again to go on after an interruption: finished parts are not answered again.
    """
    with speaking(as_json=as_json, quiet=quiet) as voice:
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among([draft_options.draft]),
            draft_revision=draft_options.draft_revision,
            prompts=prompts,
            out=out,
        )

        from domino_spec.data.answer import LocalAnswerer, answer_prompts, estimate
        from domino_spec.data.folder import target_identity
        from domino_spec.data.prompts import read_prompts
        from domino_spec.data.report import bad_lines
        from domino_spec.data.server import ServerAnswerer
        from domino_spec.evaluation import fingerprint

        read = read_prompts(prompts, limit=limit, system=chat.system)
        for line in bad_lines(read.bad):
            voice.warn(line)
        answerer: Answerer
        if server is None:
            decoder = load_decoder(voice, target, target_options, draft_options, chat)
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
        voice.note(_ahead(estimate(read, answerer, settings)))
        with Ticker(voice) as ticker:
            done = answer_prompts(
                read,
                answerer,
                out,
                settings,
                vocab_size=facts.vocab_size,
                identity={**target_identity(model, facts), "answered_by": who},
                on_progress=lambda progress: ticker.say(answers_so_far(progress)),
            )
        said = f"{done.answered:,} answers to {done.prompts:,} prompts"
        _finish(voice, out, said, done.dropped, done.to_dict())
        if not done.answered:
            voice.error(
                f"no prompt was answered ({done.dropped_reasons()}), so {out} holds no training "
                "data; expected at least one answer. Change the prompts or the settings and write "
                "to another folder."
            )
            raise typer.Exit(1)


class Ticker:
    """Progress in a line: redrawn on a terminal, now and then elsewhere."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._status: AbstractContextManager[Any] = voice.working("starting")
        self._shown: Any = None
        self._next = 0.0
        self._at_once = 2  # where it begins, and the first measure

    def __enter__(self) -> Ticker:
        self._shown = self._status.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._status.__exit__(*details)

    def say(self, text: str) -> None:
        """Say how far it is."""
        if self._shown is not None:
            self._shown.update(text)
        elif self._at_once or time.monotonic() >= self._next:
            self._at_once = max(self._at_once - 1, 0)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._voice.status(text)


def _without_weights(
    target: str, options: TargetOptions, chat: ChatOptions
) -> tuple[TargetFacts, Any | None]:
    from domino_spec.api import read_target_facts
    from domino_spec.targets import load_tokenizer

    place = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    facts = read_target_facts(target, thinking=chat.thinking, **place)  # type: ignore[arg-type]
    return facts, load_tokenizer(target, **place)  # type: ignore[arg-type]


def _ahead(ahead: Estimate) -> str:
    return (
        f"{ahead.prompts:,} prompts: at most {ahead.tokens:,} tokens, {_size(ahead.bytes)}; "
        "the first batch tells how long it takes"
    )


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
    return f"{text} · {rate:,.0f} tok/s · about {_duration(seconds)} and {_size(size)} to go"


def _finish(
    voice: Voice, out: Path, said: str, dropped: Mapping[str, int], values: dict[str, Any]
) -> None:
    size = sum(path.stat().st_size for path in out.glob("part-*"))
    if voice.as_json:
        voice.document({"folder": str(out), "bytes": size, **values, "warnings": voice.warnings})
        return
    voice.out.print(f"{said} in {out} ({_size(size)})", soft_wrap=True)
    for reason, count in dropped.items():
        voice.note(f"{count:,} dropped: {reason}")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


for _command in (check, synth, answer):
    data_app.command()(grouped(_command))
