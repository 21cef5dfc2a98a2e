"""Imports that wait: every process of a run collects every test, and few tests need these."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks everything whether it is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
