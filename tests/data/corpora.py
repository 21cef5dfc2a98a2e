"""Corpora whose tokens say which conversation and place they are from."""

from __future__ import annotations

import numpy as np

from domino_spec.data.corpus import Collector, Corpus


def make_corpus(lengths, *, prompt: int = 3, vocab: int = 1 << 20, unique: bool = True) -> Corpus:
    """Token `conversation * 2048 + place`, so that every token of the corpus differs."""
    collector = Collector(vocab_size=vocab)
    for index, length in enumerate(lengths):
        tokens = np.arange(length) + (index * 2048 if unique else 0)
        collector.add(tokens, np.arange(length) >= prompt, f"source {index % 2}", f"row {index}")
    return collector.corpus()


def random_lengths(count: int, *, low: int = 100, high: int = 480, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(low, high + 1, count).tolist()
