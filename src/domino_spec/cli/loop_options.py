"""Options of commands that decode: which loop does it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

_ENGINE = "Engine"


class EngineName(StrEnum):
    """Which loop decodes."""

    AUTO = "auto"
    FAST = "fast"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Which loop decodes, and how."""

    engine: Annotated[
        EngineName,
        typer.Option(
            help="fast is the engine, reference the loop it is checked against; auto takes the "
            "engine where it can run the request.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineName.AUTO
    pack: Annotated[
        bool,
        typer.Option(
            help="On a CPU, keep a second copy of the weights in the order it multiplies fastest.",
            rich_help_panel=_ENGINE,
        ),
    ] = True

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `DominoDecoder`."""
        return {"engine": self.engine.value, "pack": None if self.pack else False}
