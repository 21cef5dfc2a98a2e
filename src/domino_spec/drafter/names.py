"""Drafters without files, by name; to know one needs no PyTorch."""

from __future__ import annotations

from domino_spec.errors import InputError

PLAIN = "plain"
LOOKUP = "lookup"
DEFAULT_LOOKUP_DEPTH = 10


def prefix_of(source: object) -> str:
    """What stands before a colon: the kind of a drafter without files."""
    return str(source).partition(":")[0]


def has_no_files(source: object) -> bool:
    """Whether it is `plain`, `lookup` or `lookup:DEPTH`; a wrong depth is an error."""
    if prefix_of(source) == LOOKUP:
        lookup_depth(str(source))
    return str(source) == PLAIN or prefix_of(source) == LOOKUP


def lookup_depth(source: str) -> int:
    """The drafts of `lookup` or `lookup:DEPTH`."""
    _, colon, stated = source.partition(":")
    if not colon:
        return DEFAULT_LOOKUP_DEPTH
    if not stated.isdecimal() or int(stated) < 1:
        raise InputError(
            f"{source!r} asks for {stated!r} drafts; expected lookup:DEPTH, 1 or more."
        )
    return int(stated)
