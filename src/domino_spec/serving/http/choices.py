"""One answer of a reply: its blocks become text, log-probabilities and dominoes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput, TextStream, TokenScore
from domino_spec.serving.http.answered import BlockToken, DominoBlock, Finish, Usage
from domino_spec.serving.http.pieces import TokenNames

NEVER = -9999.0
"""What OpenAI writes for a probability of nothing; JSON has no infinity."""


@dataclass(frozen=True)
class Scored:
    """A token of the text, with its score."""

    token: int
    start: int
    """Where in the text it begins."""
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What a block added to an answer."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    domino: DominoBlock | None = None

    @property
    def empty(self) -> bool:
        """Whether nobody would miss it."""
        return not (self.text or self.scored or self.domino)


class Choice:
    """An answer in the making.

    Log-probabilities are given for the tokens that the text is made of, together with their text:
    neither a token of a stop string nor the sign that ends an answer is part of it.
    """

    def __init__(
        self, index: int, sequence: Decoded, names: TokenNames, *, scores: int | None, blocks: bool
    ) -> None:
        self.index = index
        self.scores = scores
        self.finish: Finish | None = None
        self.text = ""
        self.scored: list[Scored] = []
        self.cached = 0
        self.tokens = 0
        self.accepted = 0
        self.rejected = 0
        self._names = names
        self._blocks = blocks
        self._text = TextStream(names.tokenizer, sequence.params.stop)
        self._pieces = TextStream(names.tokenizer)  # each token's own, stop strings and all
        self._shown = 0
        self._waiting: list[Scored] = []

    def take(self, output: SequenceOutput) -> Piece:
        """What a step added to it."""
        at_end = output.finish_reason == "eos"
        dominoes: list[BlockToken] = []
        text = ""
        for place, token in enumerate(output.tokens):
            score = output.scores[place] if output.scores is not None else None
            ends = at_end and place == len(output.tokens) - 1
            piece = self._push(token, score, ends=ends)
            if not ends:
                text += self._text.push(token)
            if self._blocks:
                dominoes.append(
                    {
                        "id": token,
                        "text": piece,
                        "accepted": place < output.accepted,
                        "position": self.tokens,
                        "probability": None if score is None else math.exp(score.logprob),
                    }
                )
            self.tokens += 1
        self.accepted += output.accepted
        self.cached = output.sequence.cached
        domino: DominoBlock | None = None
        if self._blocks:
            domino = {
                "choice": self.index,
                "cycle": output.cycle,
                "accepted": output.accepted,
                "tokens": dominoes,
            }
        return self._release(text, domino)

    def end(self, output: SequenceOutput) -> Piece:
        """It is over; what was held back, in case it became a stop string, is text."""
        self.finish = "length" if output.finish_reason == "length" else "stop"
        self.rejected = max(0, sum(output.sequence.stats.offered) - self.accepted)
        return self._release(self._text.finish(), None)

    def _push(self, token: int, score: TokenScore | None, *, ends: bool) -> str:
        """A token's own text, and its score put by until its text is out."""
        if self.scores is None and not self._blocks:
            return ""
        if ends:
            return self._names.name(token)
        start = self._shown
        piece = self._pieces.push(token)
        if self._names.special(token):
            return self._names.name(token)
        self._shown += len(piece)
        if self.scores is not None and score is not None:
            top = score.top[: self.scores]
            self._waiting.append(Scored(token, start, score.logprob, top))
        return piece

    def _release(self, text: str, domino: DominoBlock | None) -> Piece:
        self.text += text
        out = 0
        while out < len(self._waiting) and self._waiting[out].start < len(self.text):
            out += 1
        scored, self._waiting = self._waiting[:out], self._waiting[out:]
        self.scored += scored
        return Piece(text, scored, domino)


def usage_of(choices: Sequence[Choice], sequences: Sequence[Decoded], *, n: int) -> Usage:
    """Tokens of a whole request; a prompt counts once, however many answers it has."""
    prompt = sum(len(sequence.prompt) for sequence in sequences[::n])
    made = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in choices[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(choice.accepted for choice in choices),
            "rejected_prediction_tokens": sum(choice.rejected for choice in choices),
        },
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, NEVER)
