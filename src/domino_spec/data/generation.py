"""Offline generation: the engine's batch stays full while prompts come and answers are written."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from domino_spec.api import DominoDecoder
from domino_spec.data.chat import NO_TURN, Turn
from domino_spec.decoding import SamplingParams, SequenceOutput
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stopping import at_eos, at_length, at_strings
from domino_spec.errors import DataError

_SEEDS = 2**62
_GRAM = 4


def seed_of(*parts: object) -> int:
    """A seed that depends on these alone, not on the rest of the batch."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEEDS


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether fewer than half of the 4-grams are distinct: a model repeating itself."""
    count = len(tokens) - _GRAM + 1
    if count < 1:
        return False
    ids = [int(token) for token in tokens]
    distinct = len(set(zip(*(ids[start:] for start in range(_GRAM)), strict=False)))
    return 2 * distinct < count


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and how; `index` names it to the caller."""

    index: int
    tokens: Sequence[int]
    params: SamplingParams


class BatchGenerator:
    """Continues any number of prompts with the target, with drafts if the decoder has a drafter."""

    def __init__(
        self, decoder: DominoDecoder, *, batch_size: int = 32, turn: Turn = NO_TURN
    ) -> None:
        """`turn` is what ends an output. `batch_size` is for targets the engine cannot run."""
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; expected 1 or more.")
        if decoder.tokenizer is None:
            raise DataError(
                "the target came without a tokenizer, so it can neither read nor write prompts."
            )
        self.decoder, self.turn = decoder, turn
        self.tokenizer: Any = decoder.tokenizer
        self.batch_size = 1 if decoder.target.batch_refusal else batch_size

    def text(self, tokens: Sequence[int]) -> str:
        """An output as text, up to where its turn ends."""
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return text.split(self.turn.end_text)[0] if self.turn.end_text else text

    def generate(self, next_prompt: Callable[[], Prompt | None]) -> Generator[Decoded, None, None]:
        """Each sequence as it ends; its `index` is the prompt's.

        `next_prompt` is called whenever the engine has room in its queue. It gives None while it
        has none, and is asked again after a sequence has ended.
        """
        running: dict[int, Prompt] = {}

        def next_sequence() -> Decoded | None:
            prompt = next_prompt()
            if prompt is None:
                return None
            running[prompt.index] = prompt
            return self._sequence(prompt)

        if self.decoder.unsupported_reason() is None:
            try:
                yield from _ended(self.decoder.run((), more=next_sequence), running)
                return
            except torch.OutOfMemoryError:
                pass  # in batches, then; outside the except, since an error holds memory
        yield from self._in_batches(deque(running.values()), next_prompt)

    def _in_batches(
        self, waiting: deque[Prompt], next_prompt: Callable[[], Prompt | None]
    ) -> Generator[Decoded, None, None]:
        """Batches that run to their end, half as large after each that the memory did not hold."""
        while True:
            while len(waiting) < self.batch_size and (prompt := next_prompt()) is not None:
                waiting.append(prompt)
            if not waiting:
                return
            batch = [waiting.popleft() for _ in range(min(self.batch_size, len(waiting)))]
            left = {prompt.index: prompt for prompt in batch}
            try:
                yield from _ended(self.decoder.run([self._sequence(p) for p in batch]), left)
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise DataError(
                        "the device ran out of memory with a single sequence of "
                        f"{len(batch[0].tokens)} prompt tokens and up to "
                        f"{batch[0].params.max_new_tokens} new ones; shorten it, or use a smaller "
                        "dtype or another device."
                    ) from error
                self.batch_size = len(batch) // 2
            waiting.extendleft(reversed(left.values()))

    def _sequence(self, prompt: Prompt) -> Decoded:
        """A fresh sequence, whose draws follow from the parameters' seed alone."""
        ends = {*self.decoder.eos_token_ids, *self.turn.end_ids}
        rules = [at_eos(ends)]
        if self.turn.end_text:
            rules.append(at_strings([self.turn.end_text], self.tokenizer))
        return Decoded(
            prompt.tokens,
            prompt.params,
            index=prompt.index,
            seed=prompt.params.seed_of(0),
            stop_rules=[*rules, at_length()],
            eos=ends,
        )


def _ended(
    outputs: Generator[SequenceOutput, None, None], left: dict[int, Prompt]
) -> Generator[Decoded, None, None]:
    """Sequences as they end; those of `left` have not."""
    with closing(outputs):
        for output in outputs:
            if output.finish_reason is not None:
                del left[output.sequence.index]
                yield output.sequence
