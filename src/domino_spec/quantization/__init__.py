"""Weights in GGUF's blocks, multiplied as they are."""

from domino_spec.quantization.reference import BLOCK, KINDS, Kind
from domino_spec.quantization.tiles import TILE
from domino_spec.quantization.weight import QuantizedWeight

__all__ = ["BLOCK", "KINDS", "TILE", "Kind", "QuantizedWeight"]
