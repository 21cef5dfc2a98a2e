"""What our own code drafts after each token of a known text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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


def assert_nearly_ours(
    blocks: Mapping[int, Sequence[int]],
    *,
    target: Target,
    drafter: DraftModel,
    tokens: list[int],
    first: int,
    depth: int,
    other_layers: tuple[int, ...],
) -> None:
    """Blocks by their anchors' positions, and the text itself, but for what bfloat16 rounds.

    The measure can tell: with the states of `other_layers` fewer drafts are equal.
    """
    logits = target.forward(torch.tensor([tokens]), target.new_cache(1)).logits[0, first - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens[first:]).unsqueeze(1)).squeeze(1)
    assert (logits.max(dim=-1).values - chosen).max() < 0.3 * logits.std()

    def equal() -> float:
        ours = reference_blocks(target, drafter, tokens, first=first, depth=depth)
        pairs = [
            (theirs, own)
            for position, block in blocks.items()
            for theirs, own in zip(block[1:], ours[position - first][1:], strict=True)
        ]
        return sum(theirs == own for theirs, own in pairs) / len(pairs)

    own_config, found = drafter.config, equal()
    drafter.config = replace(own_config, target_layer_ids=other_layers)
    otherwise = equal()
    drafter.config = own_config
    print(f"of the drafts in {len(blocks)} blocks {found:.3f} are ours; else {otherwise:.3f}")
    assert found > 0.85
    assert otherwise < 0.7
