"""`domino generate`: finish one prompt or a batch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import (
    QUIET,
    ChatOptions,
    GrammarOptions,
    ImageOption,
    LoopOptions,
    NoSpeculateOption,
    SamplingOptions,
    TargetArgument,
    load_decoder,
    require_images,
    require_places,
    user_content,
)
from domino_spec.cli.render import LEGEND, TokenWriter, shortened, statistics_lines, write_plain
from domino_spec.errors import InputError
from domino_spec.settings import DraftOptions, TargetOptions

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder, Generation


@command(quiet=QUIET)
def generate(
    voice: Voice,
    target: TargetArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; - reads stdin.")
    ] = None,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; several make a batch; - reads stdin."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", help="A file that holds one prompt.")
    ] = None,
    image: ImageOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue plain text, without the chat template.")
    ] = False,
    no_speculate: NoSpeculateOption = False,
    draft_options: DraftOptions,
    sampling: SamplingOptions,
    grammar: GrammarOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    loop_options: LoopOptions,
) -> None:
    """Finish a prompt, several tokens per forward pass, exactly as the target alone would.

    A prompt is a user message if the target's tokenizer has a chat template, else plain text.
    """
    given = [*(texts or []), *(prompt or [])]
    written = collect_prompts(given, files=prompt_file or [], raw=raw)
    images = image or []
    if images and len(written) > 1:
        raise InputError(f"--image is for one prompt; {len(written)} are given.")
    require_images(images)
    require_places(voice, target, target_options.revision, draft=draft_options)
    params = dataclasses.replace(sampling.params(), grammar=grammar.read())
    decoder = load_decoder(voice, target, target_options, draft_options, chat, loop_options)
    prompts = [
        as_prompt(text, decoder.tokenizer, raw=raw, system=chat.system, images=images)
        for text in written
    ]
    if not raw and isinstance(prompts[0], str):
        voice.note("the target's tokenizer has no chat template: continuing plain text")
    speculate = decoder.speculates and not no_speculate
    if len(prompts) == 1 and not voice.as_json:
        if speculate and voice.has_colour:
            voice.note(LEGEND)
        writer = TokenWriter(voice.out, coloured=speculate)
        with voice.holding_warnings():
            for token in decoder.stream(prompts[0], params, speculate=speculate):
                writer.write(token)
            writer.end()
        run, tokens = token.run, writer.tokens
    else:
        with voice.working(f"generating {len(prompts)} answers"):
            generations: list[Generation] = decoder.generate(prompts, params, speculate=speculate)
        run, tokens = generations[0].run, sum(len(each.tokens) for each in generations)
        if voice.as_json:
            voice.document(_document(voice, decoder, written, generations, speculate))
            return
        for index, (text, each) in enumerate(zip(written, generations, strict=True), start=1):
            voice.say(f"── {index}/{len(prompts)} · {shortened(text, 60)}")
            write_plain(voice.out, f"{each.text}\n")
    if not speculate:
        voice.note(f"decoded plainly: {why_plain(decoder)}")
    for line in statistics_lines(run, tokens):
        voice.note(line)


def why_plain(decoder: DominoDecoder) -> str:
    """Why there are no drafts."""
    return "--no-speculate was given" if decoder.speculates else "no --draft was given"


def _document(
    voice: Voice,
    decoder: DominoDecoder,
    written: list[str],
    generations: list[Generation],
    speculate: bool,
) -> dict[str, Any]:
    run = generations[0].run  # one run serves the whole batch
    tokens = sum(len(generation.tokens) for generation in generations)
    answers = [
        {"prompt": text, **generation.to_dict()}
        for text, generation in zip(written, generations, strict=True)
    ]
    for answer in answers:
        del answer["run"]
    return {
        "target": decoder.target.name,
        "speculate": speculate,
        "depth": decoder.depth if speculate else 0,
        "depth_adapts": speculate and run.engine == "fast" and decoder.adapts,
        "dtype": decoder.target.dtype_name,
        "generations": answers,
        "run": {
            **run.to_dict(),
            "tokens": tokens,
            "tokens_per_second": tokens / run.seconds if run.seconds else 0.0,
        },
        "warnings": voice.warnings,
        "notes": voice.notes,
    }


STDIN = "-"
CliPrompt = str | list[dict[str, Any]]


def collect_prompts(
    given: Sequence[str], *, files: Sequence[Path] = (), raw: bool = False
) -> list[str]:
    """All prompts in order: texts (or `-` for stdin), then one for each file."""
    if not given and not files:
        raise typer.BadParameter(
            "there is no prompt; give a text, --prompt, --prompt-file, or - to read stdin."
        )
    reads_stdin = list(given).count(STDIN) + [str(path) for path in files].count(STDIN)
    if reads_stdin > 1:
        raise typer.BadParameter("stdin (-) can be read once; it is given several times.")
    texts = [_read(STDIN) if text == STDIN else text for text in given]
    texts += [_read(str(path)) for path in files]
    for index, text in enumerate(texts, start=1):
        if not (text if raw else text.strip()):
            which = f"prompt {index} of {len(texts)}" if len(texts) > 1 else "the prompt"
            raise InputError(f"{which} is empty; expected some text.")
    return texts


def as_prompt(
    text: str,
    tokenizer: Any,
    *,
    raw: bool,
    system: str | None,
    images: Sequence[Path] = (),
) -> CliPrompt:
    """A user message where the tokenizer has a chat template, else plain text to continue."""
    if raw and images:
        raise InputError("an image needs the chat template, but --raw was given; drop one of them.")
    # Some models keep the template of chats with images with their processor alone.
    if raw or not (images or getattr(tokenizer, "chat_template", None)):
        if system is not None:
            why = "--raw was given" if raw else "the target's tokenizer has no chat template"
            raise InputError(f"a system message needs a chat template, but {why}; drop --system.")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": user_content(text.rstrip("\n"), images)}]


def _read(path: str) -> str:
    where = "from stdin" if path == STDIN else f"file {path}"
    try:
        raw = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise InputError(f"the prompt {where} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt {where} is not UTF-8 text.") from error
