"""Sequences with a grammar: the masks of all positions of their drafts, before any is chosen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from domino_spec.decoding import Sequence as Decoded

WORKERS = min(8, (os.cpu_count() or 1) // 2)
"""Threads that walk grammars: most of a walk needs no GIL."""


class DraftMasks:
    """Which tokens may follow each token of some sequences' blocks.

    A grammar's own failure is its sequence's `error`, and the others go on. Sequences without a
    grammar, and those that have ended, may choose any token.
    """

    def __init__(self, sequences: Sequence[Decoded], drafts: Sequence[Sequence[int]]) -> None:
        """Walks the drafts [sequences][n - 1] of each and leaves its matcher as it was."""
        depth = len(drafts[0])
        words = max(each.matcher.words for each in sequences if each.matcher is not None)
        masks = np.full((len(sequences), depth + 1, words), -1, dtype=np.int32)
        self._reach = [depth] * len(sequences)

        def walk(index: int) -> None:
            sequence = sequences[index]
            assert sequence.matcher is not None
            try:
                self._reach[index] = sequence.matcher.walk(drafts[index], masks[index])
            except Exception as error:
                sequence.error = error

        live = [i for i, s in enumerate(sequences) if s.matcher is not None and not s.finished]
        if WORKERS > 1 and len(live) > 1:
            list(_pool(WORKERS).map(walk, live))
        else:
            for index in live:
                walk(index)
        self.masks = torch.from_numpy(masks)  # [sequences, n, words]

    @property
    def reach(self) -> Tensor | None:
        """How many drafts may be accepted at most, [sequences]; None where all may be."""
        whole = self.masks.shape[1] - 1
        return None if min(self._reach) == whole else torch.tensor(self._reach)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="domino-grammar")
