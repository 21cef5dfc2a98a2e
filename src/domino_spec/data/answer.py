"""Prompts answered by the target, part by part, into a folder of training data."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from domino_spec.data.answerers import Answer, Answerer, Request
from domino_spec.data.chat import CUT
from domino_spec.data.folder import WorkFolder
from domino_spec.data.generation import seed_of
from domino_spec.data.loops import is_loop
from domino_spec.data.messages import Message
from domino_spec.data.prompts import PromptRow, PromptSet
from domino_spec.data.shards import write_shard
from domino_spec.decoding import SamplingParams
from domino_spec.errors import DataError

LOOP = "the answer is a loop"
EMPTY = "the answer is empty"
_SAMPLED_PROMPTS = 200
Format = Literal["shards", "jsonl"]
_BYTES: Mapping[Format, int] = {"shards": 2, "jsonl": 5}
"""A token's size in a file, roughly."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are drawn and written; a folder keeps to one set of these."""

    max_new_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0,)
    """Each prompt gets one of them, decided by the seed."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    part_size: int = 256
    """Prompts a part: as much is lost at most when a run is stopped."""
    format: Format = "shards"

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise DataError("no temperature was given; expected one or more, 0 is greedy.")
        if self.part_size < 1:
            raise DataError(f"part_size is {self.part_size}; expected 1 or more.")
        if self.format not in ("shards", "jsonl"):
            raise DataError(f"format is {self.format!r}; expected shards or jsonl.")
        for temperature in self.temperatures:
            self.params(temperature, 0)  # checks the rest

    def params(self, temperature: float, seed: int) -> SamplingParams:
        """The sampling of one answer."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            accept="coupled",  # the same text from the engine and from the reference loop
        )

    def temperature_of(self, index: int) -> float:
        """Which temperature a prompt gets."""
        return self.temperatures[seed_of(self.seed, "temperature", index) % len(self.temperatures)]


@dataclass(frozen=True)
class Estimate:
    """What is ahead, before anything was answered: upper bounds."""

    prompts: int
    answers: int
    tokens: int
    bytes: int


@dataclass
class AnswerProgress:
    """How far a run is. Counts of this session exclude what was there before."""

    prompts: int
    done: int = 0
    answered: int = 0
    session_prompts: int = 0
    session_tokens: int = 0
    session_bytes: int = 0
    session_seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def seconds_left(self) -> float | None:
        """Judged by what was answered so far; None before that."""
        if not self.session_prompts:
            return None
        return self.session_seconds / self.session_prompts * (self.prompts - self.done)

    @property
    def bytes_left(self) -> float | None:
        """What will still be written, before compression."""
        if not self.session_prompts:
            return None
        return self.session_bytes / self.session_prompts * (self.prompts - self.done)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        values = {**vars(self), "dropped": dict(self.dropped)}
        del values["began"]
        return values


def estimate(prompts: PromptSet, answerer: Answerer, settings: AnswerSettings) -> Estimate:
    """Bounds from a sample of the prompts and the longest possible answers."""
    step = max(len(prompts.rows) // _SAMPLED_PROMPTS, 1)
    sample = prompts.rows[::step]
    used = [answerer.prompt_tokens([*row.opening(), _user(row.turns[0])]) for row in sample]
    answers = sum(len(row.turns) for row in prompts.rows)
    tokens = int(answers * (sum(used) / len(used) + settings.max_new_tokens))
    return Estimate(len(prompts.rows), answers, tokens, tokens * _BYTES[settings.format])


def answer_prompts(
    prompts: PromptSet,
    answerer: Answerer,
    folder: str | Path,
    settings: AnswerSettings,
    *,
    vocab_size: int,
    identity: Mapping[str, Any],
    on_progress: Callable[[AnswerProgress], None] | None = None,
) -> AnswerProgress:
    """Answer every prompt once. What a stopped run has finished is there and is not done again.

    `identity` says who answers (the target, its tokenizer); a folder keeps to that as well.
    """
    suffix = ".npz" if settings.format == "shards" else ".jsonl"
    kept = {**dataclasses.asdict(settings), **identity, "prompts": prompts.fingerprint()}
    work = WorkFolder(folder, kept, suffix=suffix)
    tell = on_progress or (lambda _progress: None)
    progress = AnswerProgress(len(prompts.rows))
    size = settings.part_size
    todo = []
    for number, start in enumerate(range(0, len(prompts.rows), size)):
        if work.is_done(number):
            _count(progress, work.note(number))
        else:
            todo.append((number, start))
    tell(progress)
    for number, start in todo:
        rows = prompts.rows[start : start + size]
        part = _Part(rows, start, settings, progress, tell)
        part.answer(answerer)
        work.write_note(number, part.note())
        if settings.format == "jsonl":
            work.write_lines(number, part.lines())
        else:
            part.write(work.part(number), vocab_size, identity.get("tokenizer_sha256"))
        progress.done -= part.counted
        _count(progress, part.note())
        tell(progress)
    return progress


@dataclass(frozen=True)
class _Kept:
    prompt: list[int]
    tokens: list[int]
    source: str
    temperature: float
    finished: bool


class _Part:
    """A part's conversations: all first turns are answered, then all second ones, and so on."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        start: int,
        settings: AnswerSettings,
        progress: AnswerProgress,
        tell: Callable[[AnswerProgress], None],
    ) -> None:
        self._rows, self._start, self._settings = rows, start, settings
        self._progress, self._tell = progress, tell
        self._chats: list[list[Message]] = [row.opening() for row in rows]
        self._kept: list[list[_Kept]] = [[] for _ in rows]
        self._dropped: Counter[str] = Counter()
        self._turn = 0
        self.counted = 0
        """First turns that progress was told of before the part was whole."""

    def answer(self, answerer: Answerer) -> None:
        """Answer turn after turn; a dropped or cut answer ends its conversation."""
        going = list(range(len(self._rows)))
        turn = 0
        while going:
            for place in going:
                self._chats[place].append(_user(self._rows[place].turns[turn]))
            requests = [Request(self._chats[place], self._params(place, turn)) for place in going]
            self._turn = turn
            answers = answerer.answer(requests, self._told)
            turn += 1
            going = [
                place
                for place, answer in zip(going, answers, strict=True)
                if self._take(place, answer) and turn < len(self._rows[place].turns)
            ]

    def _told(self, answers: Sequence[Answer]) -> None:
        progress = self._progress
        if self._turn == 0:
            self.counted += len(answers)
            progress.done += len(answers)
            progress.session_prompts += len(answers)
        tokens = sum(len(answer.tokens) for answer in answers)
        prompt_tokens = sum(len(answer.prompt) for answer in answers)
        progress.session_tokens += tokens
        progress.session_bytes += (tokens + prompt_tokens) * _BYTES[self._settings.format]
        progress.session_seconds = time.perf_counter() - progress.began
        self._tell(progress)

    def _params(self, place: int, turn: int) -> SamplingParams:
        index = self._start + place
        seed = seed_of(self._settings.seed, "answer", index, turn)
        return self._settings.params(self._settings.temperature_of(index), seed)

    def _take(self, place: int, answer: Answer) -> bool:
        """Keep an answer that is one; whether the conversation can go on."""
        reason = answer.refused or (LOOP if is_loop(answer.tokens) else "")
        if not reason and not answer.text.strip():
            reason = EMPTY
        if reason:
            self._dropped[reason] += 1
            self._chats[place].pop()
            return False
        temperature = self._settings.temperature_of(self._start + place)
        source = self._rows[place].source
        kept = _Kept(answer.prompt, answer.tokens, source, temperature, answer.finished)
        self._kept[place].append(kept)
        self._chats[place].append({"role": "assistant", "content": answer.text})
        return answer.finished

    def note(self) -> dict[str, Any]:
        """What went into this part."""
        answered = sum(map(len, self._kept))
        return {
            "prompts": len(self._rows),
            "answered": answered,
            "dropped": dict(self._dropped),
        }

    def lines(self) -> list[dict[str, Any]]:
        """Conversations for a JSONL file."""
        return [
            {
                "messages": chat,
                "source": kept[-1].source,
                "temperature": kept[-1].temperature,
                "finish_reason": "stop" if kept[-1].finished else CUT,
            }
            for chat, kept in zip(self._chats, self._kept, strict=True)
            if kept
        ]

    def write(self, path: Path, vocab_size: int, tokenizer_sha256: str | None) -> None:
        """A shard: one conversation an answer, the turns before it are its prompt."""
        kept = [one for several in self._kept for one in several]
        write_shard(
            path,
            prompts=[one.prompt for one in kept],
            answers=[one.tokens for one in kept],
            vocab_size=vocab_size,
            sources=[one.source for one in kept],
            temperatures=[one.temperature for one in kept],
            tokenizer_sha256=tokenizer_sha256,
        )


def _count(progress: AnswerProgress, note: Mapping[str, Any]) -> None:
    progress.done += int(note["prompts"])
    progress.answered += int(note["answered"])
    progress.dropped.update(note["dropped"])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
