"""Lossless speculative decoding with Domino drafters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domino_spec.api import RECIPE as RECIPE
    from domino_spec.api import DominoDecoder as DominoDecoder
    from domino_spec.api import DominoGenerate as DominoGenerate
    from domino_spec.api import Generation as Generation
    from domino_spec.api import StreamedToken as StreamedToken
    from domino_spec.checkpoints import Provenance as Provenance
    from domino_spec.checkpoints import load_drafter as load_drafter
    from domino_spec.checkpoints import save_drafter as save_drafter
    from domino_spec.checkpoints import save_packed as save_packed
    from domino_spec.decoding import SamplingParams as SamplingParams
    from domino_spec.drafter import DominoHeadConfig as DominoHeadConfig
    from domino_spec.drafter import Drafter as Drafter
    from domino_spec.drafter import DrafterConfig as DrafterConfig
    from domino_spec.drafter import HeadConfig as HeadConfig
    from domino_spec.drafter import MarkovHeadConfig as MarkovHeadConfig
    from domino_spec.errors import DominoError as DominoError
    from domino_spec.targets import Target as Target
    from domino_spec.targets import load_target as load_target

__version__ = "0.1.0"

_HOMES = {
    "RECIPE": "api",
    "DominoDecoder": "api",
    "DominoGenerate": "api",
    "Generation": "api",
    "StreamedToken": "api",
    "Provenance": "checkpoints",
    "load_drafter": "checkpoints",
    "save_drafter": "checkpoints",
    "save_packed": "checkpoints",
    "SamplingParams": "decoding",
    "DominoHeadConfig": "drafter",
    "Drafter": "drafter",
    "DrafterConfig": "drafter",
    "HeadConfig": "drafter",
    "MarkovHeadConfig": "drafter",
    "DominoError": "errors",
    "Target": "targets",
    "load_target": "targets",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing the package stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'domino_spec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"domino_spec.{_HOMES[name]}"), name)
