"""Prompts to measure on: files of turns, or the conversations of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.api.prompts import encode_prompt
from domino_spec.data import Corpus
from domino_spec.errors import InputError


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts of one set, and where in their source each stood."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    """From 0, in the order of the source; those left out leave gaps."""
    too_long: int = 0

    @classmethod
    def of(cls, name: str, prompts: Iterable[Sequence[int]], *, longest: int) -> PromptSet:
        """Leave out what is longer than `longest` tokens, and count it."""
        every = [tuple(prompt) for prompt in prompts]
        kept = [number for number, prompt in enumerate(every) if len(prompt) <= longest]
        return cls(name, tuple(every[n] for n in kept), tuple(kept), len(every) - len(kept))


def read_turns(path: str | Path, *, limit: int | None = None) -> list[str]:
    """The first turn of each line of a JSON lines file of `{"turns": [...]}`."""
    path = Path(path)
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; expected 1 or more; leave it out for all.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"the prompts {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompts {path} are not UTF-8 text.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    turns = [_first_turn(line, f"{path}, line {number}") for number, line in numbered[:limit]]
    if not turns:
        raise InputError(f'{path} holds no prompts; expected lines such as {{"turns": ["..."]}}.')
    return turns


def encode_turns(
    name: str,
    turns: Sequence[str],
    tokenizer: Any | None,
    *,
    longest: int,
    system: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Each turn as the user's message, through the chat template."""
    before = [] if system is None else [{"role": "system", "content": system}]
    chats = [[*before, {"role": "user", "content": turn}] for turn in turns]
    prompts = [encode_prompt(chat, tokenizer, chat_options) for chat in chats]
    return PromptSet.of(name, prompts, longest=longest)


def corpus_prompts(
    name: str, corpus: Corpus, *, longest: int, limit: int | None = None
) -> PromptSet:
    """What stands before each conversation's first answer; a prompt met before is left out."""
    starts = ((index, corpus.first_supervised(index)) for index in range(len(corpus)))
    found = {tuple(corpus[index].tokens[:start].tolist()): None for index, start in starts if start}
    if not found:
        raise InputError(f"{name} has no conversation with a prompt; expected chats, not texts.")
    return PromptSet.of(name, list(found)[:limit], longest=longest)


def _first_turn(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {error}.") from error
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise InputError(
            f'{place} is {line[:60]!r}; expected an object such as {{"turns": ["a question"]}}.'
        )
    return turns[0]
