"""Drafts from hidden states: `drafter.rollout` on the device, without asking it for a token.

The Domino head has kernels: over each slot's best candidates in one launch a draft
(`rollout_candidates`), over the whole vocabulary in two (`rollout_vocabulary`). Everything else,
large batches too, goes through PyTorch's own operations; these can be captured in a graph as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.decoding.noise import noised
from domino_spec.drafter.heads import DominoHead, Head
from domino_spec.fast.kernels import rollout_candidates, rollout_vocabulary
from domino_spec.fast.kernels.gumbel import Noise
from domino_spec.fast.kernels.runtime import usable


def roll_out(
    head: Head | None,
    *,
    embedding: Tensor,  # [vocabulary, hidden]: what the target's first layer sees, in head's type
    hidden: Tensor,  # [rows, depth, hidden]
    anchor_tokens: Tensor,  # [rows]
    base: Tensor,  # [rows, depth, k]: the base logits of `columns`, or of all output tokens
    columns: Tensor | None = None,  # [rows, depth, k]: which output tokens may be drafted
    draft_tokens: Tensor | None = None,  # [output vocabulary]: target ids of a reduced vocabulary
    temperature: Tensor | None = None,  # [rows]; None or 0 is greedy
    seeds: Tensor | None = None,  # [rows] int64
    positions: Tensor | None = None,  # [rows] int64: where each row's first draft will stand
) -> Tensor:
    """Drafted tokens [rows, depth], as target ids.

    With a temperature, draft j of a row is the argmax of logits / temperature plus the noise of
    (seed, position + j, token): the noise that the target's own choice will meet there.
    """
    noise = None
    if temperature is not None:
        assert seeds is not None
        assert positions is not None
        noise = Noise(temperature, seeds, positions)
    if isinstance(head, DominoHead) and usable(hidden):
        rows = hidden.shape[0]
        if columns is not None and rows <= rollout_candidates.MAX_ROWS:
            return rollout_candidates.launch(
                head, embedding, hidden, anchor_tokens, base, columns, draft_tokens, noise
            )
        if columns is None and rows <= rollout_vocabulary.MAX_ROWS:
            return rollout_vocabulary.launch(
                head, embedding, hidden, anchor_tokens, base, draft_tokens, noise
            )
    return twin(head, embedding, hidden, anchor_tokens, base, columns, draft_tokens, noise)


def twin(
    head: Head | None,
    embedding: Tensor,
    hidden: Tensor,
    anchor_tokens: Tensor,
    base: Tensor,
    columns: Tensor | None,
    draft_tokens: Tensor | None,
    noise: Noise | None,
) -> Tensor:
    """`drafter.rollout.rollout` from base logits that are already there."""
    rows, depth, _ = hidden.shape
    tokens = columns
    if draft_tokens is not None:
        tokens = draft_tokens.expand(rows, depth, -1) if columns is None else draft_tokens[columns]
    if head is not None:
        projected = head.project_hidden(hidden)  # [rows, depth, ...]
        state = head.initial_state(rows, hidden)
    token, drafts = anchor_tokens, []
    for index in range(depth):
        logits = base[:, index]
        if head is not None:
            state = head.step(token, state, lambda read: F.embedding(read, embedding))
            if index >= head.prefix_len:
                tried = None if columns is None else columns[:, index]
                logits = logits + head.correction(projected[:, index], state, tried)
        ids = None if tokens is None else tokens[:, index]  # [rows, k]
        if noise is not None:
            named = (
                torch.arange(logits.shape[1], device=logits.device)[None] if ids is None else ids
            )
            logits = noised(logits, named, noise.temperature, noise.seeds, noise.positions + index)
        column = logits.argmax(dim=-1)
        token = column if ids is None else ids.gather(1, column.unsqueeze(1)).squeeze(1)
        drafts.append(token)
    return torch.stack(drafts, dim=1)
