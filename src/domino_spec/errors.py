"""Every error a user can cause: what was found, what was expected, what to do; and notices."""

from __future__ import annotations


class DominoError(Exception):
    """Base of all errors raised on purpose; the command line prints them as one line."""


class ConfigError(DominoError, ValueError):
    """A drafter configuration that is incomplete, unknown or contradicts itself."""


class CheckpointError(DominoError, ValueError):
    """A checkpoint whose files, tensors or fields are not what they should be."""


class TargetError(DominoError, ValueError):
    """A target model that cannot be loaded, captured from or rolled back exactly."""


class MismatchError(DominoError, ValueError):
    """A drafter and a target that do not belong together."""


class InputError(DominoError, ValueError):
    """A prompt or a sampling parameter that makes no sense."""


class DataError(DominoError, ValueError):
    """Training data that cannot be read, is empty or belongs to something else."""


class TrainingError(DominoError, RuntimeError):
    """A training run that cannot start, go on or be trusted."""


class ExportError(DominoError, ValueError):
    """A drafter that the asked form of checkpoint cannot express."""


class UnreachableError(DominoError, RuntimeError):
    """A server that does not answer, or not as its API says."""


class Notice(UserWarning):
    """Worth knowing about a run, though nothing is wrong with it."""
