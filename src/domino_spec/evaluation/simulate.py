"""Acceptance length without decoding: draft at every token of the target's own answers at once.

Greedy speculative decoding writes the target's own answer whatever the drafter does, so the
states before every possible anchor are known beforehand. One target forward captures the hidden
states, many anchors share a drafter forward, and a walk over the results counts the cycles that
decoding would have taken: `tests/evaluation/test_simulate.py` holds the two together. Answers
drawn at a temperature give the counts of decoding with the `match` rule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_spec.decoding import AcceptanceStats
from domino_spec.drafter import DraftModel
from domino_spec.drafter.masks import Window
from domino_spec.drafter.rollout import rollout
from domino_spec.drafters import BlockDrafter
from domino_spec.engine.kernels.rollout import default_candidates
from domino_spec.errors import InputError
from domino_spec.evaluation.continuations import Continuations
from domino_spec.evaluation.runs import batches
from domino_spec.targets import Target, read

_ANCHORS = 32
"""Anchors of a sequence in one forward: attention between them is computed in vain."""
_STAGES = (2, 6)
"""Most anchors miss early: few need the logits of a whole block."""


@dataclass(frozen=True)
class Simulation:
    """What decoding would have counted."""

    sequences: list[AcceptanceStats]
    """One a continuation, in order."""
    first_draft_accuracy: float
    """Share of all anchors whose first draft is right."""

    @property
    def total(self) -> AcceptanceStats:
        """All counts together."""
        return AcceptanceStats.sum(self.sequences)

    @property
    def tokens_per_cycle(self) -> float:
        """All committed tokens over all cycles."""
        return self.total.tokens_per_cycle


@torch.no_grad()
def simulate(
    drafter: DraftModel,
    target: Target,
    continuations: Continuations,
    *,
    depth: int | None = None,
    candidates: int | None = None,
    window: Window | None = None,
    head: bool = True,
    sequences_per_forward: int = 16,
    max_slots: int = 4096,
    batch_size: int | None = None,
) -> Simulation:
    """Count the cycles that decoding these prompts would take.

    `candidates` are those that decoding on this device would take, where they are None. `window` is
    the context that a drafter reads. `head=False` drafts with the base logits alone.
    `max_slots` bounds the block slots of a drafter forward, and so the logits held at a time.
    `batch_size` is that of the reference loop, where a sequence's last block is as wide as the
    longest of its batch needs; unset: the engine, whose blocks have the whole depth.
    """
    asked = BlockDrafter(drafter, candidates=candidates).with_depth(depth)
    depth = asked.depth
    candidates = asked.candidates or default_candidates(drafter.head, drafter.backbone.fc.weight)
    if max_slots < 1:
        raise InputError(f"max_slots is {max_slots}; expected 1 or more.")
    answers = continuations.answers
    matches: list[list[int]] = [[0] * (len(answer) - 1) for answer in answers]
    with _measuring(drafter if head else without_head(drafter), window) as measured:
        for batch in batches([len(answer) for answer in answers], target, sequences_per_forward):
            chosen = continuations.select(batch)
            if depth and len(chosen.answers[-1]) > 1:  # the longest of the batch
                found = _matches(
                    measured,
                    target,
                    chosen,
                    depth=depth,
                    candidates=candidates,
                    max_slots=max_slots,
                )
                for index, counts in zip(batch, found, strict=True):
                    matches[index] = counts
    stats = walk(
        matches,
        depth=depth,
        max_new_tokens=continuations.max_new_tokens,
        batches=None
        if batch_size is None
        else batches([len(p) for p in continuations.prompts], target, batch_size),
    )
    first = [count > 0 for own in matches for count in own]
    return Simulation(stats, sum(first) / len(first) if first else 0.0)


def without_head(drafter: DraftModel) -> DraftModel:
    """The same drafter with its base logits alone; the weights are shared."""
    bare = copy.copy(drafter)
    bare._modules = {**drafter._modules, "head": None}
    bare.config = replace(drafter.config, head=None)
    return bare


def _matches(
    drafter: DraftModel,
    target: Target,
    continuations: Continuations,
    *,
    depth: int,
    candidates: int | None,
    max_slots: int,
) -> list[list[int]]:
    """After each token of each answer but the last: how many drafts are the answer's own."""
    device = drafter.device
    pairs = list(zip(continuations.prompts, continuations.answers, strict=True))
    # Padding goes after each sequence, where neither causal attention nor an anchor can see it.
    tokens = _padded([prompt + answer[:-1] for prompt, answer in pairs], fill=0)
    captured = read(target, tokens, capture_layers=drafter.config.target_layer_ids).captured
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    context = drafter.context(captured, positions)

    starts = torch.tensor([len(prompt) for prompt, _ in pairs], device=device).unsqueeze(1)
    counts = torch.tensor([len(answer) - 1 for _, answer in pairs], device=device).unsqueeze(1)
    width = int(counts.max())
    # -1 is no token: drafts after the end of an answer are never right.
    answers = _padded([answer + (-1,) * depth for _, answer in pairs], fill=-1).to(device)
    found = torch.zeros(len(pairs), width, dtype=torch.long, device=device)
    step = max(1, min(_ANCHORS, max_slots // (len(pairs) * drafter.config.block_size)))
    for first in range(0, width, step):
        index = torch.arange(first, min(first + step, width), device=device)
        anchor_tokens = answers[:, index]
        hidden = drafter.draft_hidden(
            target,
            anchor_tokens=anchor_tokens.clamp(min=0),
            anchors=starts + index,
            context=context,
            context_positions=positions,
        )
        real = index < counts  # [batch, anchors]
        truth = answers.unfold(1, depth, 1)[:, index + 1]  # [batch, anchors, depth]
        found[:, index] = found[:, index].masked_scatter(
            real,
            count_right(
                drafter,
                target,
                hidden=hidden[real][:, :depth],
                anchor_tokens=anchor_tokens[real],
                truth=truth[real],
                candidates=candidates,
            ),
        )
    return [own[: len(answer) - 1] for own, (_, answer) in zip(found.tolist(), pairs, strict=True)]


def count_right(
    drafter: DraftModel,
    target: Target,
    *,
    hidden: Tensor,  # [anchors, depth, hidden]
    anchor_tokens: Tensor,  # [anchors]
    truth: Tensor,  # [anchors, depth]
    candidates: int | None,
) -> Tensor:
    """How many leading drafts are right after each anchor, [anchors]."""
    depth = truth.shape[1]
    right = torch.zeros_like(anchor_tokens)
    going = torch.arange(len(anchor_tokens), device=anchor_tokens.device)
    for stage in (*(s for s in _STAGES if s < depth), depth):
        drafts = rollout(
            drafter,
            target,
            hidden=hidden[going, :stage],
            anchor_tokens=anchor_tokens[going],
            candidates=candidates,
        )
        counts = (drafts == truth[going, :stage]).long().cumprod(dim=1).sum(dim=1)
        right[going] = counts
        going = going[counts == stage]
        if not len(going):
            break
    return right


def _padded(sequences: Sequence[Sequence[int]], *, fill: int) -> Tensor:
    """Sequences of different lengths as one [batch, longest]."""
    padded = torch.full((len(sequences), max(map(len, sequences))), fill, dtype=torch.long)
    for index, tokens in enumerate(sequences):
        padded[index, : len(tokens)] = torch.tensor(tokens)
    return padded


@contextmanager
def _measuring(drafter: DraftModel, window: Window | None) -> Iterator[DraftModel]:
    """As decoding runs it, leaving a drafter in training as it was found."""
    modes = {module: module.training for module in drafter.modules()}
    backbone = drafter.backbone
    found = backbone.attention, backbone.draft_window
    drafter.eval()
    backbone.attention, backbone.draft_window = "dense", window
    try:
        yield drafter
    finally:
        backbone.attention, backbone.draft_window = found
        for module, training in modes.items():
            module.training = training


def walk(
    matches: Sequence[Sequence[int]],
    *,
    depth: int,
    max_new_tokens: int,
    batches: Sequence[Sequence[int]] | None,
) -> list[AcceptanceStats]:
    """Each sequence's counts, where `matches[n][i]` drafts are right after its i-th token.

    A sequence has one token more than matches: its last is no anchor. The first is the prefill's.
    `batches` are the reference loop's; on the engine (None) every block has the whole depth.
    """
    stats = [AcceptanceStats() for _ in matches]
    for batch in [range(len(matches))] if batches is None else batches:
        done = dict.fromkeys(batch, 1)
        going = [number for number in batch if matches[number]]
        while going:
            width = depth
            if batches is not None:
                width = min(depth, max_new_tokens - min(done[number] for number in going) - 1)
            for number in going:
                room = max_new_tokens - done[number]
                left = len(matches[number]) + 1 - done[number]
                accepted = min(matches[number][done[number] - 1], width)
                committed = min(accepted + 1, left)
                # A draft that ends the sequence leaves none after it that could be verified.
                ended = accepted == left
                offered = accepted if ended else min(width, room)
                stats[number].record(drafts=offered, accepted=accepted, committed=committed)
                done[number] += committed
            going = [number for number in going if done[number] <= len(matches[number])]
    return stats
