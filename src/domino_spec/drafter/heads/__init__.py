"""Heads: what reads the drafted prefix and corrects the backbone's logits by it."""

from __future__ import annotations

from domino_spec.drafter.config import DominoHeadConfig, HeadConfig, MarkovHeadConfig
from domino_spec.drafter.heads.base import Embed, Head
from domino_spec.drafter.heads.domino import DominoHead
from domino_spec.drafter.heads.markov import MarkovHead
from domino_spec.errors import ConfigError

__all__ = [
    "DominoHead",
    "DominoHeadConfig",
    "Embed",
    "Head",
    "HeadConfig",
    "MarkovHead",
    "MarkovHeadConfig",
    "build_head",
]


def build_head(
    config: HeadConfig, *, hidden_size: int, vocab_size: int, output_vocab_size: int
) -> Head:
    """The module of a configuration."""
    match config:
        case DominoHeadConfig():
            return DominoHead(config, hidden_size=hidden_size, output_vocab_size=output_vocab_size)
        case MarkovHeadConfig():
            return MarkovHead(config, vocab_size=vocab_size, output_vocab_size=output_vocab_size)
    raise ConfigError(f"no head is known for {type(config).__name__}; expected Domino or Markov.")
