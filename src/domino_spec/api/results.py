"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domino_spec.decoding import AcceptanceStats, RunStats, TokenScore


@dataclass(frozen=True)
class Generation:
    """One finished sequence."""

    prompt_tokens: list[int]
    tokens: list[int]
    """Generated ids, with the end-of-sequence token if there was one."""
    text: str | None
    """None when there is no tokenizer. Special tokens, the stop string and the token that ended the
    sequence are left out, unless its parameters say otherwise."""
    finish_reason: str
    """`eos`, `length` or `stop`."""
    stats: AcceptanceStats
    run: RunStats
    """The whole run this sequence was part of, with its wall times."""
    scores: list[TokenScore] | None = None
    """One a token, if `logprobs` asked for them."""
    prompt_scores: list[TokenScore | None] | None = None
    """One a token of the prompt, None for its first, if `prompt_logprobs` asked for them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        told = [{"logprob": each.logprob, "top": each.top} for each in self.scores or ()]
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": len(self.prompt_tokens),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
            "run": self.run.to_dict(),
            **({} if self.scores is None else {"scores": told}),
        }


@dataclass(frozen=True)
class StreamedToken:
    """One committed token of a stream."""

    token: int
    text: str
    """The text it completes; empty while a character or a stop string is still open."""
    accepted: bool
    """Whether it was drafted; otherwise it is the target's own."""
    cycle: int
    """0 is the prefill. Tokens of one cycle come from one block."""
    finish_reason: str | None
    """Set on the last token."""
    run: RunStats
    """The run so far."""
