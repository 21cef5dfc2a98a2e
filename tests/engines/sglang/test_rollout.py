"""SGLang's own rollout drafts what ours drafts, block by block."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.drafter.rollout import rollout

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed; see tests/engines/requirements-sglang.txt",
)

from sglang.srt.speculative.domino_utils import domino_greedy_rollout

ROWS = 6
SHAPES = {
    # hidden, vocabulary, block, GRU, rank
    "tiny": (16, 48, 4, 12, 6),
    "narrow head": (24, 200, 16, 5, 3),
    "wide head": (16, 64, 8, 64, 32),
    "two slots": (16, 48, 2, 12, 6),  # one draft: the head never acts
    "long block": (32, 500, 24, 16, 8),
}


class Vocabulary:
    """A target's embedding and lm_head."""

    def __init__(self, vocab: int, hidden: int, generator: torch.Generator) -> None:
        self.embedding = nn.Embedding(vocab, hidden)
        self.embedding.weight.data.normal_(generator=generator)
        self.out = torch.randn(vocab, hidden, generator=generator)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        return hidden @ (self.out if tokens is None else self.out[tokens]).T


def make(
    shape: str, *, shift: bool, generator: torch.Generator
) -> tuple[DraftModel, Vocabulary, Tensor, Tensor]:
    """A drafter with a random head, its target, hidden states of whole blocks and anchors."""
    hidden, vocab, block, gru, rank = SHAPES[shape]
    config = DrafterConfig(
        hidden_size=hidden, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, vocab_size=vocab, num_target_layers=4, target_layer_ids=(1, 2),
        mask_token_id=0, block_size=max(block, 3), shift_label=shift,
        head=DominoHeadConfig(gru_hidden_dim=gru, emb_dim=rank, pure_draft_prefix_len=1),
    )  # fmt: skip
    drafter = DraftModel(config).eval()
    assert drafter.head is not None
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter.normal_(0.0, 0.7, generator=generator)
    slots = torch.randn(ROWS, block, hidden, generator=generator)
    anchors = torch.randint(0, vocab, (ROWS,), generator=generator)
    return drafter, Vocabulary(vocab, hidden, generator), slots, anchors


def theirs(drafter: DraftModel, target: Vocabulary, slots: Tensor, anchors: Tensor) -> Tensor:
    head: Any = drafter.head
    options: dict[str, Any] = {}
    if "in_cuda_graph" in inspect.signature(domino_greedy_rollout).parameters:
        options["in_cuda_graph"] = False
    return domino_greedy_rollout(
        draft_hidden=slots,
        bonus_tokens=anchors,
        target_embedding=target.embedding,
        lm_head_weight=target.out,
        prefix_gru=head.prefix_gru,
        embed_proj=head.embed_proj,
        vocab_size=drafter.config.vocab_size,
        shift_label=drafter.config.shift_label,
        candidate_pool_size=0,
        **options,
    )


@torch.no_grad()
def ours(drafter: DraftModel, target: Vocabulary, slots: Tensor, anchors: Tensor) -> Tensor:
    first, depth = drafter.config.first_slot, slots.shape[1] - 1
    return rollout(drafter, target, hidden=slots[:, first : first + depth], anchor_tokens=anchors)


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no-shift"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_draft_the_same_blocks(shape: str, shift: bool) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        made = make(shape, shift=shift, generator=generator)
        assert theirs(*made).tolist() == ours(*made).tolist()


def test_the_heads_change_the_drafts() -> None:
    """Else equal blocks would prove nothing."""
    drafter, *rest = make("tiny", shift=True, generator=torch.Generator().manual_seed(0))
    corrected = ours(drafter, *rest)
    drafter.head = None
    assert (corrected != ours(drafter, *rest)).any()


def test_the_alignment_changes_the_drafts() -> None:
    shifted = make("tiny", shift=True, generator=torch.Generator().manual_seed(0))
    straight = make("tiny", shift=False, generator=torch.Generator().manual_seed(0))
    assert theirs(*shifted).tolist() != theirs(*straight).tolist()
