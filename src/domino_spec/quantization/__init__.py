"""Weights of few bits: GGUF's blocks for CPUs, numbers with scales for GPUs."""

from domino_spec.quantization.reference import KINDS, Kind
from domino_spec.quantization.scaled import SCALED_KINDS, ScaledKind, ScaledWeight
from domino_spec.quantization.weight import QuantizedWeight

__all__ = ["KINDS", "SCALED_KINDS", "Kind", "QuantizedWeight", "ScaledKind", "ScaledWeight"]
