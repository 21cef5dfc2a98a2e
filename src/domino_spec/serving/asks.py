"""What is asked of the service, and what comes back while it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from domino_spec.decoding import Commit, RowStats, SamplingParams
from domino_spec.errors import DominoError, InputError


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One answer to one prompt: a row to be. A request with n choices is n of these."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True
    """Without drafts the text is the same; it is here to be raced against."""
    reuse: bool = True
    """Whether what lies in the slots may stand for the prompt's beginning."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one answer committed in one cycle."""

    choice: int
    """Which of the ticket's asks."""
    commit: Commit
    cached: int
    """Prompt tokens whose states were there already."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An answer is complete; its last block came before."""

    choice: int
    reason: str
    """`eos`, `stop` or `length`."""
    stats: RowStats


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An answer that will not be completed, and why; the others of its ticket go on."""

    choice: int
    error: Exception


Event = Block | Ended | Failed


class BusyError(DominoError, RuntimeError):
    """The queue is full: come back later."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which there is likely room."""


class StoppingError(DominoError, RuntimeError):
    """The server is going down and takes nothing new, or ended an answer for that reason."""


class TooLongError(InputError):
    """A prompt, or a prompt and its answer, that no slot holds."""


class TooManyError(TooLongError):
    """More new tokens than any answer may have, however short its prompt."""


class DecodingError(DominoError, RuntimeError):
    """Decoding this answer failed; a bug of ours or of the machine, not of the request."""
