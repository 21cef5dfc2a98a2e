"""`domino generate`: finish one prompt or a batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.loading import checkpoints_among, load_decoder, require_places
from domino_spec.cli.options import (
    ChatOptions,
    DraftOptions,
    JsonOption,
    LoopOptions,
    NoSpeculateOption,
    QuietOption,
    SamplingOptions,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.render import LEGEND, TokenWriter, shortened, statistics_lines, write_plain
from domino_spec.cli.voice import Voice, speaking
from domino_spec.errors import InputError

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder, Generation
    from domino_spec.decoding import RunStats, SamplingParams


def generate(
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue plain text, without the chat template.")
    ] = False,
    no_speculate: NoSpeculateOption = False,
    draft_options: DraftOptions,
    sampling: SamplingOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    loop_options: LoopOptions,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Finish a prompt, several tokens per forward pass, exactly as the target alone would.

    A prompt is a user message if the target's tokenizer has a chat template, else plain text.
    """
    with speaking(as_json=as_json, quiet=quiet) as voice:
        given = [*(texts or []), *(prompt or [])]
        written = collect_prompts(given, files=prompt_file or [], raw=raw)
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among([draft_options.draft]),
            draft_revision=draft_options.draft_revision,
        )
        params = sampling.params()
        decoder = load_decoder(voice, target, target_options, draft_options, chat, loop_options)
        prompts = [
            as_prompt(text, decoder.tokenizer, raw=raw, system=chat.system) for text in written
        ]
        if not raw and isinstance(prompts[0], str):
            voice.note("the target's tokenizer has no chat template: continuing plain text")
        speculate = decoder.speculates and not no_speculate
        if as_json:
            generations = decoder.generate(prompts, params, speculate=speculate)
            voice.document(_document(voice, decoder, written, generations, speculate))
        elif len(prompts) == 1:
            _stream(voice, decoder, prompts[0], params, speculate)
        else:
            _batch(voice, decoder, written, prompts, params, speculate)


def _stream(
    voice: Voice,
    decoder: DominoDecoder,
    prompt: CliPrompt,
    params: SamplingParams,
    speculate: bool,
) -> None:
    if speculate and voice.has_colour:
        voice.note(LEGEND)
    writer = TokenWriter(voice.out, coloured=speculate)
    with voice.holding_warnings():
        for token in decoder.stream(prompt, params, speculate=speculate):
            writer.write(token)
        writer.end()
    _say_statistics(voice, decoder, token.run, writer.tokens, speculate)


def _batch(
    voice: Voice,
    decoder: DominoDecoder,
    written: list[str],
    prompts: list[CliPrompt],
    params: SamplingParams,
    speculate: bool,
) -> None:
    with voice.working(f"generating {len(prompts)} answers"):
        generations: list[Generation] = decoder.generate(prompts, params, speculate=speculate)
    for index, (text, generation) in enumerate(zip(written, generations, strict=True), start=1):
        voice.out.print(f"── {index}/{len(prompts)} · {shortened(text, 60)}", soft_wrap=True)
        write_plain(voice.out, f"{generation.text}\n")
    tokens = sum(len(generation.tokens) for generation in generations)
    _say_statistics(voice, decoder, generations[0].run, tokens, speculate)


def _say_statistics(
    voice: Voice, decoder: DominoDecoder, stats: RunStats, tokens: int, speculate: bool
) -> None:
    if not speculate:
        why = "no --draft was given" if not decoder.speculates else "--no-speculate was given"
        voice.note(f"decoded plainly: {why}")
    for line in statistics_lines(stats, tokens):
        voice.note(line)


def _document(
    voice: Voice,
    decoder: DominoDecoder,
    written: list[str],
    generations: list[Generation],
    speculate: bool,
) -> dict[str, Any]:
    run = generations[0].run
    tokens = sum(len(generation.tokens) for generation in generations)
    answers = []
    for text, generation in zip(written, generations, strict=True):
        answer = {"prompt": text, **generation.to_dict()}
        answer.pop("run")  # one run serves the whole batch
        answers.append(answer)
    return {
        "target": decoder.target.name,
        "speculate": speculate,
        "depth": decoder.depth if speculate else 0,
        "depth_adapts": speculate and run.engine == "fast" and decoder.adapts,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
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
CliPrompt = str | list[dict[str, str]]


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
    texts = [_read_stdin() if text == STDIN else text for text in given]
    texts += [_read(path) for path in files]
    for index, text in enumerate(texts, start=1):
        if not (text if raw else text.strip()):
            which = f"prompt {index} of {len(texts)}" if len(texts) > 1 else "the prompt"
            raise InputError(f"{which} is empty; expected some text.")
    return texts


def as_prompt(text: str, tokenizer: Any, *, raw: bool, system: str | None) -> CliPrompt:
    """A user message where the tokenizer has a chat template, else plain text to continue."""
    if raw or not getattr(tokenizer, "chat_template", None):
        if system is not None:
            why = "--raw was given" if raw else "the target's tokenizer has no chat template"
            raise InputError(f"a system message needs a chat template, but {why}; drop --system.")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text.rstrip("\n")}]


def _read(path: Path) -> str:
    if str(path) == STDIN:
        return _read_stdin()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the prompt file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt file {path} is not UTF-8 text.") from error


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("the prompt from stdin is not UTF-8 text.") from error
