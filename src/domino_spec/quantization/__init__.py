"""Weights of few bits: GGUF's blocks for CPUs, numbers with scales for GPUs."""

from domino_spec.quantization.reference import BLOCK, KINDS, Kind
from domino_spec.quantization.scaled import SCALED_KINDS, ScaledKind, ScaledWeight
from domino_spec.quantization.tiles import TILE
from domino_spec.quantization.weight import QuantizedWeight

__all__ = [
    "BLOCK", "KINDS", "SCALED_KINDS", "TILE", "Kind", "QuantizedWeight", "ScaledKind",
    "ScaledWeight",
]  # fmt: skip
