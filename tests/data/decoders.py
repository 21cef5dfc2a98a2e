"""A tiny random chat model and what it is asked."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from domino_spec.api import DominoDecoder
from domino_spec.data.prompts import PromptRow, PromptSet
from tests.support.families import make_target
from tests.support.tokens import small_tokenizer

VOCAB = 97


@cache
def tiny_decoder() -> DominoDecoder:
    return DominoDecoder(make_target("llama"), None, small_tokenizer())


def prompt_set(count: int, *, turns: int = 1) -> PromptSet:
    """Prompts of all lengths, in no order of them."""
    texts = ["the quick fox " * (1 + index * 7 % 5) + "a" * index for index in range(count)]
    return PromptSet([PromptRow((text, *["then what"] * (turns - 1))) for text in texts])


def contents(folder: Path) -> dict[str, bytes]:
    """What a folder holds, whatever the order it was written in."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
