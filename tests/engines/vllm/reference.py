"""What our own code drafts after each token of a known text."""

import torch

from domino_spec.drafter import DraftModel
from domino_spec.drafter.rollout import rollout
from domino_spec.targets import Target, read


def reference_blocks(
    target: Target,
    drafter: DraftModel,
    tokens: list[int],
    *,
    first: int,
    depth: int,
    candidates: int | None = None,
) -> list[list[int]]:
    """For each token from `first` on: the token as anchor, then our drafts after it."""
    text = torch.tensor([tokens])
    anchors = torch.arange(first, len(tokens))
    hidden = drafter.block_hidden(
        target,
        captured=read(target, text, capture_layers=drafter.config.target_layer_ids).captured,
        tokens=text,
        anchors=anchors.unsqueeze(0),
        positions=torch.arange(len(tokens)).unsqueeze(0),
        documents=None,
    )
    anchor_tokens = text[0, anchors]
    drafts = rollout(
        drafter,
        target,
        hidden=hidden[0, :, :depth],
        anchor_tokens=anchor_tokens,
        candidates=candidates,
    )
    blocks: list[list[int]] = torch.cat((anchor_tokens.unsqueeze(1), drafts), dim=1).tolist()
    return blocks
