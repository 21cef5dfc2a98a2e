"""One conversation as a drafter is trained on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.integer]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Example:
    """Token ids, and which of them the target wrote: only those are learnt."""

    tokens: npt.NDArray[np.int32]  # [n]
    supervised: BoolArray  # [n]
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)
