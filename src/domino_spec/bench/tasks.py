"""Prompts to measure on: built-in sets, files of prompts, or a data set of the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.api.prompts import encode_prompt
from domino_spec.bench.settings import digest
from domino_spec.data.prompts import PromptRow, read_prompts
from domino_spec.errors import InputError
from domino_spec.evaluation import PromptSet

_SETS = Path(__file__).parent / "sets"
BUILT_IN = ("maths", "code", "chat")
"""Two dozen short prompts each, written for this package; nothing is trained on them."""


@dataclass(frozen=True)
class Task:
    """One set of prompts as text: the first turn of each."""

    name: str
    rows: tuple[PromptRow, ...]

    def encoded(
        self,
        tokenizer: Any,
        *,
        longest: int,
        chat_options: Mapping[str, Any] | None = None,
    ) -> PromptSet:
        """As token ids: through the chat template where there is one, else as plain text."""
        chats = bool(getattr(tokenizer, "chat_template", None))
        prompts = []
        for row in self.rows:
            turn = {"role": "user", "content": row.turns[0]}
            prompt = [*row.opening(), turn] if chats else row.turns[0]
            prompts.append(encode_prompt(prompt, tokenizer, chat_options))
        return PromptSet.of(self.name, prompts, longest=longest)


def task_of(name: str, texts: Sequence[str], *, system: str | None = None) -> Task:
    """Texts that are known already."""
    return Task(name, tuple(PromptRow((text,), system) for text in texts))


def read_tasks(
    sources: Sequence[str],
    *,
    limit: int | None = None,
    system: str | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> list[Task]:
    """A task for each source: a name of `BUILT_IN`, a file or folder, or `hf:NAME[:SPLIT]`."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; expected 1 or more; leave it out for all.")
    tasks = []
    for source in sources or BUILT_IN:
        built_in = source in BUILT_IN and not Path(source).exists()
        path = str(_SETS / f"{source}.jsonl") if built_in else source
        found = read_prompts([path], limit=limit, system=system)
        for line in found.bad.lines():
            notice(f"{source}: {line}")
        tasks.append(Task(_name(source), tuple(found.rows)))
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"two sets of prompts are called {twice[0]}; rename one of them.")
    return tasks


def prompts_digest(prompts: PromptSet) -> str:
    """A hash of a set's tokens: figures on others do not belong in the same table."""
    return digest([list(map(list, prompts.prompts)), list(prompts.numbers)])


def _name(source: str) -> str:
    if source.startswith("hf:"):
        return source.removeprefix("hf:")
    return Path(source).stem
