"""A bigram target that chats, and a drafter that knows it, as folders with provenance."""

from __future__ import annotations

from pathlib import Path

import torch

from domino_spec.checkpoints import (
    Provenance,
    chat_template_fingerprint,
    save_drafter,
    tokenizer_fingerprint,
)
from domino_spec.drafter import DraftModel, DraftModule
from tests.cli import tiny
from tests.support.pair import bigram_target, knowing_drafter

SIZE = tiny.VOCAB + 4
MASK = tiny.VOCAB
"""An id that the tokenizer does not use."""
ASSISTANT = tiny.SPECIALS.index("<|assistant|>")


def successors(*, seed: int = 0) -> torch.Tensor:
    """One cycle through all text tokens; everything else leads into it."""
    first = len(tiny.SPECIALS)
    generator = torch.Generator().manual_seed(seed)
    order = first + torch.randperm(tiny.VOCAB - first, generator=generator)
    table = torch.full((SIZE,), int(order[0]))
    table[order] = order.roll(-1)
    return table


def save_target(folder: Path, *, seed: int = 0, tokenizer=None) -> Path:
    bigram_target(successors(seed=seed)).model.save_pretrained(folder)
    (tokenizer or tiny.make_tokenizer()).save_pretrained(folder)
    return folder


def knowing(**changes) -> DraftModel:
    return knowing_drafter(
        **{"shift": True, "prefix": 1, "table": successors(), "mask": MASK, **changes}
    )


def known(**changes) -> Provenance:
    tokenizer = tiny.make_tokenizer()
    facts = {
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
        "chat_template_sha256": chat_template_fingerprint(tokenizer),
        "training_length": 128,
        "tokens_per_cycle": 7.5,
    }
    return Provenance(**facts | changes)


def save(folder: Path, drafter: DraftModule, provenance: Provenance | None = None) -> Path:
    return save_drafter(drafter, folder, provenance=provenance)
