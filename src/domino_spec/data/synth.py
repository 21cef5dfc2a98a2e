"""Synthetic prompts: the target writes the user's part of its own chat template."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.api import DominoDecoder
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {**vars(self), "dropped": dict(self.dropped)}


def synthesise(
    decoder: DominoDecoder,
    folder: str | Path,
    settings: SynthSettings,
    *,
    count: int,
    batch_size: int = 32,
    system: str | None = None,
    identity: Mapping[str, Any] | None = None,
    on_progress: Callable[[SynthProgress], None] | None = None,
) -> SynthProgress:
    """Write `count` different prompts; a stopped run goes on, and a larger count adds to it.

    `system` is a system message to draw them under, which steers what they are about.
    """
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value < 1:
            raise DataError(f"{name} is {value}; expected 1 or more.")
    kept = {**settings.model_dump(), **(identity or {}), "system": system}
    source = CandidateSource(decoder, settings, batch_size=batch_size, system=system)
    work = WorkFolder(folder, kept, suffix=".jsonl")
    progress = SynthProgress(count)
    tell = on_progress or (lambda _progress: None)
    seen: set[str] = set()
    number = 0
    while work.is_done(number):
        note = work.note(number)
        seen.update(map(normalised, _prompts_in(work.part(number))))
        progress.prompts += int(note["prompts"])
        progress.candidates += int(note["candidates"])
        progress.dropped.update(note["dropped"])
        number += 1
    tell(progress)
    found: list[str] = []
    before = dataclasses.replace(progress, dropped=Counter(progress.dropped))
    fruitless = 0
    if progress.prompts >= count:
        return progress
    with closing(source.draw(progress)) as candidates:
        for text, fault in candidates:
            reason = fault or ("repeated" if normalised(text) in seen else "")
            progress.candidates += 1
            fruitless += 1
            if reason:
                progress.dropped[reason] += 1
            else:
                seen.add(normalised(text))
                found.append(text)
                progress.prompts += 1
                fruitless = 0
            tell(progress)
            if fruitless >= _FRUITLESS:
                reasons = ", ".join(f"{n} {reason}" for reason, n in progress.dropped.most_common())
                raise DataError(
                    f"the target gave no new prompt in {fruitless} candidates ({reasons}); "
                    f"{progress.prompts - len(found)} are in {folder}. Raise the temperature or "
                    "max_tokens, or give prompts of your own."
                )
            drawn = progress.candidates - before.candidates
            if drawn == settings.part_size or progress.prompts == count:
                note = {
                    "prompts": len(found),
                    "candidates": drawn,
                    "dropped": dict(progress.dropped - before.dropped),
                }
                work.write_note(number, note)
                work.write_lines(number, map(_row, found))
                number += 1
                found = []
                before = dataclasses.replace(progress, dropped=Counter(progress.dropped))
            if progress.prompts == count:
                break  # what else was drawn is drawn again if more are wanted
    return progress


class CandidateSource:
    """Draws user messages: candidate n is the same one whenever it is drawn."""

    def __init__(
        self,
        decoder: DominoDecoder,
        settings: SynthSettings,
        *,
        batch_size: int,
        system: str | None = None,
    ) -> None:
        if decoder.tokenizer is None:
            raise DataError("the target came without a tokenizer, so it cannot write prompts.")
        turn = find_turn(decoder.tokenizer, "user", decoder.chat_options, system=system)
        self._settings, self._batch = settings, batch_size
        self._generator = BatchGenerator(decoder, batch_size=batch_size, turn=turn)
        self._special = special_ids(decoder.tokenizer)
        ids = self._generator.tokenizer(turn.opening, add_special_tokens=False)["input_ids"]
        self._opening = [int(token) for token in ids]
        if not self._opening:
            raise DataError(
                "the target's chat template writes nothing before a user's message, so there is "
                "nothing to draw from; give prompts of your own."
            )

    def draw(self, progress: SynthProgress) -> Generator[tuple[str, str], None, None]:
        """Candidates in their order, each with what is wrong with it; endless."""
        drawn = due = progress.candidates
        ended: dict[int, Decoded] = {}

        def next_prompt() -> Prompt | None:
            nonlocal drawn
            # No more ahead of the caller than are wanted, in the best case.
            if drawn - progress.candidates >= max(self._batch, progress.wanted - progress.prompts):
                return None
            prompt = Prompt(drawn, self._opening, self._settings.params(drawn))
            drawn += 1
            return prompt

        with closing(self._generator.generate(next_prompt)) as sequences:
            for sequence in sequences:
                ended[sequence.index] = sequence
                while due in ended:
                    candidate = ended.pop(due)
                    due += 1
                    tokens = _without_end(candidate)
                    text = self._generator.text(tokens).strip()
                    yield text, self._fault(candidate, tokens, text)

    def _fault(self, sequence: Decoded, tokens: list[int], text: str) -> str:
        if sequence.finish_reason == "length":
            return "too long"
        if len(tokens) < self._settings.min_tokens or not text:
            return "too short"
        if is_loop(tokens):
            return "loops"
        return "with special tokens" if any(t in self._special for t in tokens) else ""


def normalised(text: str) -> str:
    """What two prompts share that differ in case, spacing or the form of characters alone."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "source": "self"}


def _without_end(sequence: Decoded) -> list[int]:
    return sequence.output[:-1] if sequence.finish_reason == "eos" else sequence.output


def _prompts_in(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["messages"][0]["content"] for line in lines if line]
