"""What a form of checkpoint is: what it can express, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.checkpoints.folder import dtype_name, write_folder
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.errors import ExportError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A drafter to write, the type its weights are stored in, and what is known about it."""

    drafter: Drafter
    dtype: torch.dtype
    provenance: Provenance | None = None
    lm_head: Tensor | None = None  # [draft vocabulary, hidden]
    """The target's lm_head rows of a reduced vocabulary; only some forms store them."""

    @property
    def config(self) -> DrafterConfig:
        """The drafter's own."""
        return self.drafter.config

    @property
    def dtype_name(self) -> str:
        """The type as config.json spells it."""
        return dtype_name(self.dtype)

    def write(
        self, folder: Path, *, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> Path:
        """Write a form's tensors and config, in the source's type and with its provenance."""
        return write_folder(
            folder, tensors=tensors, config=config, dtype=self.dtype, provenance=self.provenance
        )


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of checkpoint."""

    description: str
    check: Callable[[DrafterConfig, torch.dtype], None]
    """Raises where the form cannot express a drafter."""
    write: Callable[[Source, Path], Path]
    stores_lm_head: bool = False
    """Whether a reduced vocabulary comes with the target's lm_head rows."""

    def wants_lm_head(self, config: DrafterConfig) -> bool:
        """Whether writing this drafter takes rows of the target's lm_head."""
        return self.stores_lm_head and config.draft_vocab_size is not None


def everything(config: DrafterConfig, dtype: torch.dtype) -> None:
    """The check of a form that can express every drafter."""


def lm_head_rows(source: Source, form: str) -> Tensor:
    """The rows that a reduced vocabulary needs; missing or mis-shaped ones are refused."""
    config = source.config
    expected = (config.output_vocab_size, config.hidden_size)
    if source.lm_head is None:
        raise ExportError(
            f"the drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens, and a "
            f"{form} checkpoint of a reduced vocabulary holds the target's lm_head rows for them, "
            "which the drafter has not. Name its target (--target TARGET)."
        )
    if tuple(source.lm_head.shape) != expected:
        raise ExportError(
            f"the lm_head rows are {list(source.lm_head.shape)}; expected {list(expected)}, one "
            "row for each token of the reduced vocabulary. They are another target's."
        )
    return source.lm_head
