"""Lossless speculative decoding with Domino drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

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
    from domino_spec.drafter import DrafterConfig as DrafterConfig
    from domino_spec.drafter import DraftModel as DraftModel
    from domino_spec.drafter import HeadConfig as HeadConfig
    from domino_spec.drafter import MarkovHeadConfig as MarkovHeadConfig
    from domino_spec.errors import DominoError as DominoError
    from domino_spec.grammars import Grammar as Grammar
    from domino_spec.targets import Target as Target
    from domino_spec.targets import load_target as load_target

_NAMES = {
    "api": "RECIPE DominoDecoder DominoGenerate Generation StreamedToken",
    "checkpoints": "Provenance load_drafter save_drafter save_packed",
    "decoding": "SamplingParams",
    "drafter": "DominoHeadConfig DraftModel DrafterConfig HeadConfig MarkovHeadConfig",
    "errors": "DominoError",
    "grammars": "Grammar",
    "targets": "Target load_target",
}
if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(__name__, _NAMES)

__version__ = "0.1.0"
__all__ = ["__version__", *(name for names in _NAMES.values() for name in names.split())]
