"""Prompts from the command line, files and stdin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from domino_spec.errors import InputError

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
