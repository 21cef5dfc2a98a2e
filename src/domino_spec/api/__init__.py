"""What people call: the decoder, its results and the bridge to Transformers' generate."""

from domino_spec.api.custom_generate import RECIPE, DominoGenerate
from domino_spec.api.decoder import DominoDecoder
from domino_spec.api.facts import read_target_facts, target_facts
from domino_spec.api.notices import (
    DtypeNotice,
    MismatchWarning,
    NoGainNotice,
    ReferenceLoopNotice,
    UselessDrafterWarning,
)
from domino_spec.api.results import Generation, StreamedToken

__all__ = [
    "RECIPE",
    "DominoDecoder",
    "DominoGenerate",
    "DtypeNotice",
    "Generation",
    "MismatchWarning",
    "NoGainNotice",
    "ReferenceLoopNotice",
    "StreamedToken",
    "UselessDrafterWarning",
    "read_target_facts",
    "target_facts",
]
