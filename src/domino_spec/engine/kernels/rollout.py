"""Drafts from hidden states: `drafter.rollout` on the device, without asking it for a token.

The Domino head has kernels: over each slot's best candidates in one launch a draft
(`rollout_candidates`), over the whole vocabulary in two (`rollout_vocabulary`). Everything else,
large batches too, goes through PyTorch's own operations; these can be captured in a graph as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.drafter.heads import DominoHead, Head
from domino_spec.drafter.rollout import greedy, roll
from domino_spec.engine.kernels import rollout_candidates, rollout_vocabulary
from domino_spec.engine.kernels.choose import choose
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.packing import Table, look_up, plain_rows
from domino_spec.engine.kernels.runtime import usable

CANDIDATES = 32
"""Where a head is given each draft's best candidates without being told how many."""


def default_candidates(head: Head | None, like: Tensor) -> int | None:
    """How many candidates pay where such a tensor is; None for all tokens.

    On a GPU a draft over the whole vocabulary reads all of the head's output matrix, or takes a
    dozen launches.
    """
    return CANDIDATES if isinstance(head, DominoHead) and usable(like) else None


def roll_out(
    head: Head | None,
    *,
    embedding: Table,  # [vocabulary, hidden]: what the target's first layer sees, in head's type
    hidden: Tensor,  # [rows, depth, hidden]
    anchor_tokens: Tensor,  # [rows]
    base: Tensor,  # [rows, depth, k]: the base logits of `columns`, or of all output tokens
    columns: Tensor | None = None,  # [rows, depth, k]: which output tokens may be drafted
    draft_tokens: Tensor | None = None,  # [output vocabulary]: target ids of a reduced vocabulary
    noise: Noise | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Drafted tokens [rows, depth], as target ids, and the logits behind them, if these are kept.

    With noise, draft j of a row is the argmax of logits / temperature plus the noise of
    (seed, position + j, token): under the coupled rule the noise that the target's own choice will
    meet there. Logits [rows, depth, k] are without noise.
    """
    read = plain_rows(embedding)
    if isinstance(head, DominoHead) and usable(hidden) and read is not None:
        rows = hidden.shape[0]
        if columns is not None and rows <= rollout_candidates.MAX_ROWS:
            return rollout_candidates.launch(
                head, embedding, hidden, anchor_tokens, base, columns, draft_tokens, noise, keep
            )
        if columns is None and rows <= rollout_vocabulary.MAX_ROWS:
            return rollout_vocabulary.launch(
                head, *read, hidden, anchor_tokens, base, draft_tokens, noise, keep
            )
    return rollout_reference(
        head, embedding, hidden, anchor_tokens, base, columns, draft_tokens, noise, keep
    )


def rollout_reference(
    head: Head | None,
    embedding: Table,
    hidden: Tensor,
    anchor_tokens: Tensor,
    base: Tensor,
    columns: Tensor | None,
    draft_tokens: Tensor | None,
    noise: Noise | None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`drafter.rollout` itself, choosing with the noise."""
    kept: list[Tensor] = []

    def drawn(index: int, logits: Tensor, tokens: Tensor | None) -> Tensor:
        kept.append(logits)
        if noise is None:
            return greedy(index, logits, tokens)
        return choose(
            logits,
            temperature=noise.temperature,
            seeds=noise.seeds,
            positions=noise.positions + index,
            tokens=tokens,
        )

    drafts = roll(
        head,
        lambda read: look_up(embedding, read),
        hidden=hidden,
        anchor_tokens=anchor_tokens,
        base=base,
        columns=columns,
        draft_tokens=draft_tokens,
        choose=drawn,
    )
    return drafts, torch.stack(kept, dim=1) if keep else None
