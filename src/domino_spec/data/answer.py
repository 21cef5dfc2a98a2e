"""Prompts answered by the target, here or on a server, into a folder of training data."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import check_prompt, encode_prompt
from domino_spec.data.chat import CUT, NO_TURN, Message, find_turn
from domino_spec.data.folder import WorkFolder
from domino_spec.data.generation import BatchGenerator, Prompt, is_loop, seed_of
from domino_spec.data.prompts import PromptRow, PromptSet
from domino_spec.data.settings import AnswerSettings
from domino_spec.data.shards import write_shard
from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError

LOOP = "the answer is a loop"
EMPTY = "the answer is empty"
_SAMPLED_PROMPTS = 200
_BYTES = {"shards": 2, "jsonl": 5}
"""A token's size in a file, roughly."""


@dataclass(frozen=True)
class Request:
    """A chat whose next turn is the assistant's; one at a time of each conversation `index`."""

    index: int
    messages: list[Message]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """Token ids of prompt and answer, or why there is none."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finished: bool
    """Whether the target ended it; otherwise it was cut."""
    refused: str = ""

    @classmethod
    def none(cls, reason: str) -> Answer:
        """A prompt that cannot be answered."""
        return cls([], [], "", False, reason)


NextRequest = Callable[[], Request | None]
"""Gives None while there is none: asked again after a request was answered."""


class Answerer(Protocol):
    """The target, wherever it runs."""

    def answer(self, next_request: NextRequest) -> Iterator[tuple[Request, Answer]]:
        """Answers as they are completed, in any order; as many requests at a time as it likes."""

    def prompt_tokens(self, messages: list[Message]) -> int:
        """How long a prompt is."""


class LocalAnswerer:
    """The target on this machine."""

    def __init__(self, decoder: DominoDecoder, *, batch_size: int = 32) -> None:
        """`batch_size` is for targets that the engine cannot run."""
        self.decoder = decoder
        self._is_chat = bool(getattr(decoder.tokenizer, "chat_template", None))
        turn = NO_TURN
        if self._is_chat:
            turn = find_turn(decoder.tokenizer, "assistant", decoder.chat_options)
        self._generator = BatchGenerator(decoder, batch_size=batch_size, turn=turn)

    def prompt_tokens(self, messages: list[Message]) -> int:
        """How long a prompt is."""
        return len(self._encode(messages))

    def answer(self, next_request: NextRequest) -> Iterator[tuple[Request, Answer]]:
        """Answers as they end; the engine asks for more requests before its batch runs dry."""
        running: dict[int, Request] = {}
        refused: deque[tuple[Request, Answer]] = deque()

        def next_prompt() -> Prompt | None:
            while (request := next_request()) is not None:
                try:
                    tokens = self._encode(request.messages)
                    check_prompt(tokens, request.params.max_new_tokens, self.decoder.target)
                except InputError as error:
                    refused.append((request, Answer.none(_reason(error))))
                    continue
                running[request.index] = request
                return Prompt(request.index, tokens, request.params)
            return None

        for sequence in self._generator.generate(next_prompt):
            while refused:
                yield refused.popleft()
            text = self._generator.text(sequence.output)
            finished = sequence.finish_reason != "length"
            answer = Answer(sequence.prompt, sequence.output, text, finished)
            yield running.pop(sequence.index), answer
        yield from refused

    def _encode(self, messages: list[Message]) -> list[int]:
        prompt = messages if self._is_chat else str(messages[-1]["content"])
        return encode_prompt(prompt, self.decoder.tokenizer, self.decoder.chat_options)


def _reason(error: InputError) -> str:
    text = str(error)
    if "context" in text:
        return "its prompt and answer would not fit into the target's context"
    return text if len(text) <= 100 else f"{text[:97]}..."


_TELLING = 32
"""Answers that tell how long the others will take."""


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

    @property
    def seconds_left(self) -> float | None:
        """Judged by what was answered so far; None while that is little.

        The first answers are the shortest of all that began together, and waited for the compiler.
        """
        if self.session_prompts < min(_TELLING, self.prompts // 10 + 1):
            return None
        return self.session_seconds / self.session_prompts * (self.prompts - self.done)

    @property
    def bytes_left(self) -> float | None:
        """What will still be written, before compression."""
        if self.seconds_left is None:
            return None
        return self.session_bytes / self.session_prompts * (self.prompts - self.done)

    def dropped_reasons(self) -> str:
        """How many answers were dropped for which reason, in words."""
        return "; ".join(f"{count:,} dropped: {reason}" for reason, count in self.dropped.items())


def estimate(prompts: PromptSet, answerer: Answerer, settings: AnswerSettings) -> tuple[int, int]:
    """Tokens and bytes at most, from a sample of the prompts and the longest possible answers."""
    sample = prompts.rows[:: max(len(prompts.rows) // _SAMPLED_PROMPTS, 1)]
    used = [answerer.prompt_tokens([*row.opening(), user_message(row.turns[0])]) for row in sample]
    answers = sum(len(row.turns) for row in prompts.rows)
    tokens = int(answers * (sum(used) / len(used) + settings.max_new_tokens))
    return tokens, tokens * _BYTES[settings.format]


def answer_prompts(
    prompts: PromptSet,
    answerer: Answerer,
    folder: str | Path,
    settings: AnswerSettings,
    *,
    vocab_size: int,
    identity: Mapping[str, Any],
    on_progress: Callable[[AnswerProgress], None] = lambda _: None,
) -> AnswerProgress:
    """Answer every prompt once. What a stopped run has finished is there and is not done again.

    `identity` says who answers (the target, its tokenizer); a folder keeps to that as well. Parts
    are written as their last conversation ends, while the answerer works on those after them.
    """
    suffix = ".npz" if settings.format == "shards" else ".jsonl"
    kept = {**settings.model_dump(), **identity, "prompts": prompts.fingerprint()}
    work = WorkFolder(folder, kept, suffix=suffix)
    progress, began = AnswerProgress(len(prompts.rows)), time.perf_counter()
    size = settings.part_size
    todo: deque[int] = deque()
    for number in range(-(-len(prompts.rows) // size)):
        if work.is_done(number):
            note = work.note(number)
            progress.done += int(note["prompts"])
            progress.answered += int(note["answered"])
            progress.dropped.update(note["dropped"])
        else:
            todo.append(number)
    on_progress(progress)
    parts: dict[int, list[_Conversation]] = {}
    """Parts of which a conversation was begun and that are not written yet."""
    open_by_part: Counter[int] = Counter()
    waiting: deque[_Conversation] = deque()

    def next_request() -> Request | None:
        if not waiting and todo:
            number = todo.popleft()
            rows = enumerate(prompts.rows[number * size : (number + 1) * size], number * size)
            parts[number] = [_Conversation(index, row, settings) for index, row in rows]
            open_by_part[number] = len(parts[number])
            waiting.extend(parts[number])
        return waiting.popleft().next_request() if waiting else None

    def write_part(number: int, conversations: Sequence[_Conversation]) -> None:
        """Conversations as JSON lines, or a shard: each answer with the turns before it."""
        kept = [(chat, answer) for chat in conversations for answer in chat.answers]
        note = {
            "prompts": len(conversations),
            "answered": len(kept),
            "dropped": Counter(chat.dropped for chat in conversations if chat.dropped),
        }
        work.write_note(number, note)
        if settings.format == "shards":
            write_shard(
                work.part(number),
                prompts=[answer.prompt for _, answer in kept],
                answers=[answer.tokens for _, answer in kept],
                vocab_size=vocab_size,
                sources=[chat.row.source for chat, _ in kept],
                temperatures=[chat.temperature for chat, _ in kept],
                tokenizer_sha256=identity.get("tokenizer_sha256"),
            )
            return
        lines = [
            {
                "messages": chat.messages,
                "source": chat.row.source,
                "temperature": chat.temperature,
                "finish_reason": "stop" if chat.answers[-1].finished else CUT,
            }
            for chat in conversations
            if chat.answers
        ]
        work.write_lines(number, lines)

    for request, answer in answerer.answer(next_request):
        number = request.index // size
        conversation = parts[number][request.index % size]
        reason = conversation.take(answer)
        progress.answered += not reason
        progress.dropped.update([reason] if reason else ())
        progress.session_tokens += len(answer.tokens)
        progress.session_bytes += _BYTES[settings.format] * len((*answer.prompt, *answer.tokens))
        progress.session_seconds = time.perf_counter() - began
        if conversation.ended:
            progress.done += 1
            progress.session_prompts += 1
            open_by_part[number] -= 1
            if not open_by_part[number]:
                write_part(number, parts.pop(number))
        else:
            waiting.appendleft(conversation)
        on_progress(progress)
    return progress


class _Conversation:
    """One prompt's turns: each is answered after the answers before it."""

    def __init__(self, index: int, row: PromptRow, settings: AnswerSettings) -> None:
        self.index, self.row, self._settings = index, row, settings
        self.messages: list[Message] = row.opening()
        self.temperature = settings.temperature_of(index)
        self.answers: list[Answer] = []
        self.ended = False
        self.dropped = ""
        """Why the last turn has no answer."""

    def next_request(self) -> Request:
        """The next turn, put to the target."""
        turn = len(self.answers)
        self.messages.append(user_message(self.row.turns[turn]))
        seed = seed_of(self._settings.seed, "answer", self.index, turn)
        params = self._settings.params(self.temperature, seed)
        return Request(self.index, list(self.messages), params)

    def take(self, answer: Answer) -> str:
        """Keep an answer, or say why not; a dropped or cut one ends the conversation."""
        self.dropped = answer.refused or (LOOP if is_loop(answer.tokens) else "")
        if not self.dropped and not answer.text.strip():
            self.dropped = EMPTY
        if self.dropped:
            self.messages.pop()
            self.ended = True
            return self.dropped
        self.answers.append(answer)
        self.messages.append({"role": "assistant", "content": answer.text})
        self.ended = not answer.finished or len(self.answers) == len(self.row.turns)
        return ""


def user_message(text: str) -> Message:
    """A user's turn."""
    return {"role": "user", "content": text}
