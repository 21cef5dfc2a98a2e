"""Penalties for repeated tokens, on the device: a count for each slot and token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.decoding.processors import less_repeated


class Penalties:
    """One entry a slot. Sequences without a penalty have neutral values, which change no logits.

    Counts are of generated tokens whose states are in the caches; the anchor is not counted yet.
    They are right for sequences with a penalty only.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.counts = numbers(slots, vocabulary)
        self.prompted = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self.repetition = numbers(slots).fill_(1.0)
        self.presence = numbers(slots)
        self.frequency = numbers(slots)

    def open(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """A sequence begins here and has generated nothing yet."""
        self.repetition[slot] = float(params.repetition_penalty)
        self.presence[slot] = float(params.presence_penalty)
        self.frequency[slot] = float(params.frequency_penalty)
        if params.penalises:
            ids = torch.tensor(sorted(set(prompt)), device=self.counts.device)
            self.counts[slot].zero_()
            self.prompted[slot].zero_().index_fill_(0, ids, True)

    def apply(self, logits: Tensor, slots: Tensor, block: Tensor | None) -> Tensor:
        """Logits [batch, n, vocabulary] as float32, less the penalties of each token there.

        Position i of a block [batch, n] follows its tokens up to i; with no block there is one
        position, right after the prompt.
        """
        counts, prompted = self.counts[slots], self.prompted[slots]  # copies: [batch, vocabulary]
        each = (self.repetition, self.presence, self.frequency)
        repetition, presence, frequency = (column[slots].unsqueeze(1) for column in each)
        once = torch.ones_like(counts[:, :1])
        found = torch.empty_like(logits, dtype=torch.float32)
        for place in range(logits.shape[1]):
            if block is not None:
                counts.scatter_add_(1, block[:, place : place + 1], once)
            scores = logits[:, place].float()
            penalised = torch.where(scores < 0, scores * repetition, scores / repetition)
            scores = torch.where(prompted | (counts > 0), penalised, scores)
            found[:, place] = less_repeated(scores, counts, presence=presence, frequency=frequency)
        return found

    def count(self, slots: Tensor, block: Tensor, accepted: Tensor) -> None:
        """The anchors and accepted drafts of a block [batch, n] are in the caches now."""
        places = torch.arange(block.shape[1], device=block.device)
        kept = (places <= accepted.unsqueeze(1)).to(self.counts.dtype)
        where = slots.unsqueeze(1) * self.counts.shape[1] + block
        self.counts.view(-1).scatter_add_(0, where.flatten(), kept.flatten())
