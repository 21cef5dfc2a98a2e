"""`domino chat`: a conversation that shows which tokens were drafted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_spec.cli.command import Voice, command
from domino_spec.cli.generate import why_plain
from domino_spec.cli.loading import (
    QUIET,
    ChatOptions,
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
from domino_spec.cli.render import LEGEND, TokenWriter, speed_line, statistics_lines
from domino_spec.errors import DominoError, InputError
from domino_spec.settings import DraftOptions, TargetOptions

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.decoding import RunStats, SamplingParams

_HELP = """\
/clear  start a new conversation
/stats  statistics of all answers so far
/help   this list
/exit   leave (so does Ctrl-D)
Ctrl-C  interrupt an answer"""


@command(as_json=None, quiet=QUIET)
def chat(
    voice: Voice,
    target: TargetArgument,
    *,
    image: ImageOption = None,
    no_speculate: NoSpeculateOption = False,
    draft_options: DraftOptions,
    sampling: SamplingOptions,
    chat_options: ChatOptions,
    target_options: TargetOptions,
    loop_options: LoopOptions,
) -> None:
    """Talk with the target; accepted drafts and its own tokens differ in colour."""
    require_images(image or [])
    require_places(voice, target, target_options.revision, draft=draft_options)
    params = sampling.params()
    decoder = load_decoder(voice, target, target_options, draft_options, chat_options, loop_options)
    if not (image or getattr(decoder.tokenizer, "chat_template", None)):
        raise InputError(
            f"{target} has no chat template, so it cannot hold a conversation; continue plain "
            "text with domino generate --raw."
        )
    speculate = decoder.speculates and not no_speculate
    if speculate:
        legend = f"; {LEGEND}" if voice.has_colour else ""
        voice.note(f"up to {decoder.depth} drafts a cycle{legend}")
    else:
        voice.note(f"decoding plainly: {why_plain(decoder)}")
    voice.note("/help lists the commands, Ctrl-D leaves")
    Conversation(
        voice,
        decoder,
        params,
        system=chat_options.system,
        images=image or [],
        speculate=speculate,
    ).hold()


class Conversation:
    """The messages so far, and what is typed next."""

    def __init__(
        self,
        voice: Voice,
        decoder: DominoDecoder,
        params: SamplingParams,
        *,
        system: str | None,
        images: Sequence[Path] = (),
        speculate: bool,
    ) -> None:
        from domino_spec.decoding import RunStats

        self._voice, self._decoder = voice, decoder
        self._params, self._speculate = params, speculate
        self._images = images
        self._start: list[dict[str, Any]] = []
        if system is not None:
            self._start.append({"role": "system", "content": system})
        self._messages = list(self._start)
        self._total, self._total_tokens = RunStats(), 0

    def hold(self) -> None:
        """Answer line by line until the user leaves."""
        while True:
            try:
                line = _read_line().strip()
            except EOFError:
                if sys.stdin.isatty():
                    self._voice.err.print()
                return
            except KeyboardInterrupt:
                self._voice.err.print()
                self._voice.note("Ctrl-D or /exit leaves")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                first = self._messages == self._start
                content = user_content(line, self._images if first else ())
                try:
                    self._answer([*self._messages, {"role": "user", "content": content}])
                except DominoError as error:
                    self._voice.error(str(error))

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._messages = list(self._start)
            self._voice.err.print("a new conversation")
        elif line == "/stats":
            for text in statistics_lines(self._total, self._total_tokens):
                self._voice.err.print(text, soft_wrap=True)
        elif line == "/help":
            self._voice.err.print(_HELP)
        else:
            self._voice.error(f"there is no command {line.split()[0]}; /help lists them.")

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Stream an answer; an interrupted one counts as far as it was shown."""
        from domino_spec.api.images import encode_image_chat
        from domino_spec.api.prompts import encode_prompt

        decoder, options = self._decoder, self._decoder.chat_options
        prompt: Any = messages
        if self._images:  # encoded once more below: only so the length is known
            decoder.target.check_images()
            ids, _ = encode_image_chat(
                messages,
                decoder.processor,
                decoder.tokenizer,
                options,
                max_tokens=decoder.target.context_length,
            )
        else:
            prompt = ids = encode_prompt(messages, decoder.tokenizer, options)
        writer = TokenWriter(self._voice.out, coloured=self._speculate)
        stats: RunStats | None = None
        params = self._fitting(len(ids))
        with self._voice.holding_warnings():
            try:
                for token in decoder.stream(prompt, params, speculate=self._speculate):
                    stats = token.run
                    writer.write(token)
                writer.end()
            except KeyboardInterrupt:
                writer.end()
                self._voice.note("interrupted")
        if stats is not None:
            self._total.add(stats)
            self._total_tokens += writer.tokens
            self._voice.note(speed_line(stats, writer.tokens))
        if writer.text:
            self._messages = [*messages, {"role": "assistant", "content": writer.text}]

    def _fitting(self, prompt_length: int) -> SamplingParams:
        context = self._decoder.target.context_length
        if context is None:
            return self._params
        room = context - prompt_length
        if room < 1:
            raise InputError(
                f"the conversation has {prompt_length} tokens and no longer fits the target's "
                f"context of {context}; /clear starts a new one."
            )
        return replace(self._params, max_new_tokens=min(self._params.max_new_tokens, room))


def _read_line() -> str:
    if sys.stdin.isatty():
        if importlib.util.find_spec("readline") is not None:
            import readline  # noqa: F401  input() edits lines once it is loaded
        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
