"""What people call: the decoder, its results and the bridge to Transformers' generate."""

from domino_spec.api.custom_generate import RECIPE, DominoGenerate
from domino_spec.api.decoder import DominoDecoder
from domino_spec.api.notices import (
    DtypeNotice,
    NoGainNotice,
    ReferenceLoopNotice,
    UselessDrafterWarning,
)
from domino_spec.api.results import Generation, StreamedToken
from domino_spec.drafters import MismatchWarning
from domino_spec.drafters.facts import read_target_facts, target_facts

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
