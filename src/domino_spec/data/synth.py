"""Prompts that the target makes up itself: it writes the user's part of its own template."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.data.chat import special_ids
from domino_spec.data.folder import WorkFolder
from domino_spec.data.generation import finish, make_sequence, seed_of
from domino_spec.data.loops import is_loop
from domino_spec.data.turns import find_turn
from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.errors import DataError

_FRUITLESS = 1000
"""Candidates in a row without a new prompt, after which the target is taken to have no more."""


@dataclass(frozen=True, kw_only=True)
class SynthSettings:
    """How prompts are drawn; a folder keeps to one set of these."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 4
    max_tokens: int = 256
    """A candidate that has not ended by then is dropped."""
    seed: int = 0
    part_size: int = 256
    """Candidates a part: as much is lost at most when a run is stopped."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise DataError(
                f"temperature is {self.temperature}; greedy drawing gives one prompt only. "
                "Expected more than 0."
            )
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise DataError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; expected 1 or "
                "more, the smaller one first."
            )
        if self.part_size < 1:
            raise DataError(f"part_size is {self.part_size}; expected 1 or more.")
        self.params(0)  # checks the rest

    def params(self, candidate: int) -> SamplingParams:
        """The sampling of one candidate: its seed does not depend on its batch."""
        return SamplingParams(
            max_new_tokens=self.max_tokens + 1,  # the end token
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed_of(self.seed, "prompt", candidate),
            accept="coupled",  # the same text from the engine and from the reference loop
        )


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
    kept = {**dataclasses.asdict(settings), **(identity or {}), "system": system}
    source = CandidateSource(decoder, settings, batch_size=batch_size, system=system)
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
    tell = on_progress or (lambda _progress: None)
    tell(progress)
    fruitless = 0
    while progress.prompts < count:
        before = dataclasses.replace(progress, dropped=Counter(progress.dropped))
        found = source.part(progress, seen, tell)
        fruitless = 0 if found else fruitless + progress.candidates - before.candidates
        if fruitless >= _FRUITLESS:
            reasons = ", ".join(f"{n} {reason}" for reason, n in progress.dropped.most_common())
            raise DataError(
                f"the target gave no new prompt in {fruitless} candidates ({reasons}); "
                f"{progress.prompts} are in {folder}. Raise the temperature or max_tokens, or give "
                "prompts of your own."
            )
        work.write_note(
            number,
            {
                "prompts": progress.prompts - before.prompts,
                "candidates": progress.candidates - before.candidates,
                "dropped": dict(progress.dropped - before.dropped),
            },
        )
        work.write_lines(number, map(_row, found))
        number += 1
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
        self._decoder, self._settings = decoder, settings
        self._batch = 1 if decoder.target.batch_refusal else batch_size
        self._on_engine = decoder.unsupported_reason() is None
        if decoder.tokenizer is None:
            raise DataError("the target came without a tokenizer, so it cannot write prompts.")
        self._tokenizer: Any = decoder.tokenizer
        self._turn = find_turn(self._tokenizer, "user", decoder.chat_options, system=system)
        self._special = special_ids(self._tokenizer)
        ids = self._tokenizer(self._turn.opening, add_special_tokens=False)["input_ids"]
        self._opening = [int(token) for token in ids]
        if not self._opening:
            raise DataError(
                "the target's chat template writes nothing before a user's message, so there is "
                "nothing to draw from; give prompts of your own."
            )

    def part(
        self, progress: SynthProgress, seen: set[str], tell: Callable[[SynthProgress], None]
    ) -> list[str]:
        """New prompts among the next candidates, up to the wanted count."""
        found: list[str] = []
        end = progress.candidates + self._settings.part_size
        while progress.candidates < end and progress.prompts < progress.wanted:
            first, batch = progress.candidates, self._batch
            if self._on_engine:  # it orders any number of them and keeps its batch full
                batch = max(batch, progress.wanted - progress.prompts)
            with closing(self._draw(range(first, min(first + batch, end)))) as drawn:
                for tokens, is_whole in drawn:
                    progress.candidates += 1
                    text = self._text(tokens)
                    reason = self._fault(tokens, text, is_whole, seen)
                    if reason:
                        progress.dropped[reason] += 1
                    else:
                        seen.add(normalised(text))
                        found.append(text)
                        progress.prompts += 1
                    tell(progress)
                    if progress.prompts == progress.wanted:
                        break  # the rest of the batch is drawn again if more are wanted
        return found

    def _draw(self, candidates: range) -> Generator[tuple[list[int], bool], None, None]:
        """Candidates in their order, each once it and all before it have ended."""
        sequences = [
            make_sequence(
                self._decoder,
                self._opening,
                self._settings.params(candidate),
                index=candidate,
                end_ids=self._turn.end_ids,
                end_text=self._turn.end_text,
            )
            for candidate in candidates
        ]
        due = deque(sequences)
        for _ in finish(self._decoder, sequences):
            while due and due[0].finished:
                ended = due.popleft()
                yield _without_end(ended), ended.finish_reason != "length"

    def _text(self, tokens: list[int]) -> str:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        end = self._turn.end_text
        return (text.split(end)[0] if end else text).strip()

    def _fault(self, tokens: list[int], text: str, is_whole: bool, seen: set[str]) -> str:
        if not is_whole:
            return "too long"
        if len(tokens) < self._settings.min_tokens or not text:
            return "too short"
        if is_loop(tokens):
            return "loops"
        if any(token in self._special for token in tokens):
            return "with special tokens"
        return "repeated" if normalised(text) in seen else ""


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
