"""Synthetic prompts: the target writes the user's part of its chat template, or how texts begin."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import check_system
from domino_spec.data.chat import find_turn, special_ids
from domino_spec.data.folder import WorkFolder
from domino_spec.data.generation import BatchGenerator, Prompt, is_loop
from domino_spec.data.settings import SynthSettings
from domino_spec.decoding import Sequence as Decoded
from domino_spec.errors import DataError

_FRUITLESS = 1000
"""Candidates in a row without a new prompt, after which the target is taken to have no more."""


@dataclass
class SynthProgress:
    """How far a run is."""

    wanted: int
    prompts: int = 0
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def synthesise(
    decoder: DominoDecoder,
    folder: str | Path,
    settings: SynthSettings,
    *,
    count: int,
    batch_size: int = 32,
    system: str | None = None,
    identity: Mapping[str, Any] | None = None,
    on_progress: Callable[[SynthProgress], None] = lambda _: None,
) -> SynthProgress:
    """Write `count` different prompts; a stopped run goes on, and a larger count adds to it.

    `system` is a system message to draw them under, which steers what they are about. A target
    without a chat template writes the openings of texts, which end at `max_tokens`.
    """
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value < 1:
            raise DataError(f"{name} is {value}; expected 1 or more.")
    kept = {**settings.model_dump(), **(identity or {}), "system": system}
    generator = BatchGenerator(decoder, batch_size=batch_size)
    is_chat = bool(getattr(generator.tokenizer, "chat_template", None))
    if is_chat:
        generator.turn = find_turn(decoder.tokenizer, "user", decoder.chat_options, system=system)
        ids = generator.tokenizer(generator.turn.opening, add_special_tokens=False)["input_ids"]
    else:
        check_system(system, generator.tokenizer)
        ids = _before_a_text(decoder)
    if not ids:
        before = "chat template writes nothing before a user's message"
        raise DataError(
            f"the target's {before if is_chat else 'tokenizer has no token before a text'}, so "
            "there is nothing to draw from; give `domino data answer` prompts of your own."
        )
    opening = [int(token) for token in ids]
    work = WorkFolder(folder, kept, suffix=".jsonl")
    progress = SynthProgress(count)
    seen: set[str] = set()
    number = 0
    while work.is_done(number):
        note = work.note(number)
        seen.update(map(normalised, _prompts_in(work.part(number))))
        progress.prompts += int(note["prompts"])
        progress.candidates += int(note["candidates"])
        progress.dropped.update(note["dropped"])
        number += 1
    on_progress(progress)
    found, drawn, fruitless, dropped = list[str](), 0, 0, Counter[str]()  # of this part
    if progress.prompts >= count:
        return progress
    with closing(_candidates(generator, opening, settings, progress, is_chat)) as candidates:
        for text, fault in candidates:
            reason = fault or ("repeated" if normalised(text) in seen else "")
            progress.candidates += 1
            drawn, fruitless = drawn + 1, fruitless + 1
            if reason:
                progress.dropped[reason] += 1
                dropped[reason] += 1
            else:
                seen.add(normalised(text))
                found.append(text)
                progress.prompts += 1
                fruitless = 0
            on_progress(progress)
            if fruitless >= _FRUITLESS:
                reasons = ", ".join(f"{n} {reason}" for reason, n in progress.dropped.most_common())
                raise DataError(
                    f"the target gave no new prompt in {fruitless} candidates ({reasons}); "
                    f"{progress.prompts - len(found)} are in {folder}. Raise the temperature or "
                    "max_tokens, or give prompts of your own."
                )
            if drawn == settings.part_size or progress.prompts == count:
                note = {"prompts": len(found), "candidates": drawn, "dropped": dropped}
                work.write_note(number, note)
                work.write_lines(number, map(_row, found))
                number, found, drawn, dropped = number + 1, [], 0, Counter()
            if progress.prompts == count:
                break  # what else was drawn is drawn again if more are wanted
    return progress


def _before_a_text(decoder: DominoDecoder) -> list[int]:
    """What every text begins after: the tokenizer's own prefix, else BOS or an end token."""
    tokenizer: Any = decoder.tokenizer
    separators = [tokenizer.bos_token_id, *sorted(decoder.eos_token_ids)]
    return tokenizer("")["input_ids"] or [token for token in separators if token is not None][:1]


def _candidates(
    generator: BatchGenerator,
    opening: list[int],
    settings: SynthSettings,
    progress: SynthProgress,
    is_chat: bool,
) -> Generator[tuple[str, str], None, None]:
    """Prompts in their order, each with what is wrong with it; endless.

    Candidate n is the same one whenever it is drawn.
    """
    special = special_ids(generator.tokenizer)
    drawn = due = progress.candidates
    ended: dict[int, Decoded] = {}

    def next_prompt() -> Prompt | None:
        nonlocal drawn
        # No more ahead of the caller than are wanted, in the best case.
        ahead = max(generator.batch_size, progress.wanted - progress.prompts)
        if drawn - progress.candidates >= ahead:
            return None
        drawn += 1
        return Prompt(drawn - 1, opening, settings.params(drawn - 1))

    with closing(generator.generate(next_prompt)) as sequences:
        for sequence in sequences:
            ended[sequence.index] = sequence
            while due in ended:
                candidate = ended.pop(due)
                due += 1
                at_eos = candidate.finish_reason == "eos"
                tokens = candidate.output[:-1] if at_eos else candidate.output
                # Where a text is cut, the bytes of its last character may be incomplete.
                text = generator.text(tokens).rstrip("\ufffd").strip()
                cut = candidate.finish_reason == "length"
                faults = {
                    "too long": is_chat and cut,
                    "with nothing to continue": not is_chat and not cut,
                    "too short": len(tokens) < settings.min_tokens or not text,
                    "loops": is_loop(tokens),
                    "with special tokens": any(token in special for token in tokens),
                }
                yield text, next((fault for fault, found in faults.items() if found), "")


def normalised(text: str) -> str:
    """What two prompts share that differ in case, spacing or the form of characters alone."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "source": "self"}


def _prompts_in(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["messages"][0]["content"] for line in lines if line]
