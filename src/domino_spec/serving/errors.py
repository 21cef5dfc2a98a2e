"""Why a request is not answered."""

from __future__ import annotations

from domino_spec.errors import DominoError, InputError


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
