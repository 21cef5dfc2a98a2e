"""What the doctor is asked; it imports nothing heavy, for the command line's help."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from annotated_types import Ge, Le

from domino_spec.settings import Settings, setting

_plan = partial(setting, group="Plans")
Count = Annotated[int, Ge(1)]


class Plans(Settings):
    """What the pair is for, and how much is measured."""

    context: Count | None = _plan(None, "the longest sequence you plan, prompt and answer")
    rows: Count = _plan(1, "sequences at a time")
    measure: bool = _plan(True, "draft for a few answers of the target, or read files alone")
    prompts: Annotated[int, Ge(1), Le(50)] = _plan(8, "prompts to measure on")
    tokens: Annotated[int, Ge(8)] = _plan(32, "new tokens of each")
