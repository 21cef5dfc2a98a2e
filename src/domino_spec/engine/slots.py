"""What the engine knows of each slot, on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.decoding.processors import dense_bias, less_repeated
from domino_spec.engine.sampling import RULES, Draws


class Slots:
    """One entry a slot, and one more for those that only fill up a batch.

    `lengths[s]` tokens of slot s are in the target's cache and in the drafter's context, or wait
    for that (`ModelRunner.update_draft_cache`); the anchor is committed but in neither.
    """

    def __init__(self, count: int, vocabulary: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count + 1, dtype=dtype, device=device)

        self.count = count
        self.device = device
        self._vocabulary = vocabulary
        self._penalties: Penalties | None = None
        self._biases: Biases | None = None
        self.lengths = column(torch.long)
        self.anchors = column(torch.long)
        self.seeds = column(torch.long)
        self.temperature = column(torch.float32)
        self.top_k = column(torch.long)
        self.top_p = column(torch.float64)  # 1 - top_p is rounded once, as Transformers does
        self.min_p = column(torch.float32)
        self.rules = column(torch.long)  # places in `RULES`

    @property
    def spare(self) -> int:
        """The slot of those that only fill up a batch."""
        return self.count

    @property
    def penalties(self) -> Penalties:
        """Made when a sequence first has one: a number for each slot and token takes memory."""
        if self._penalties is None:
            self._penalties = Penalties(self.count + 1, self._vocabulary, self.device)
        return self._penalties

    @property
    def biases(self) -> Biases:
        """Made when a sequence first has one, for the same reason."""
        if self._biases is None:
            self._biases = Biases(self.count + 1, self._vocabulary, self.device)
        return self._biases

    def open(
        self,
        slots: Sequence[int],
        *,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        ends: Sequence[Collection[int]],
    ) -> Tensor:
        """Sequences begin here: their prompts are in the caches, the anchors are to come.

        Gives the slots as a tensor [n]. Nothing waits for the device.
        """
        whole = [
            [slot, len(prompt), seed, each.top_k, RULES.index(each.rule) if each.samples else 0]
            for slot, prompt, each, seed in zip(slots, prompts, params, seeds, strict=True)
        ]
        parts = [[float(p.temperature), float(p.top_p), float(p.min_p)] for p in params]
        places, lengths, seed, top_k, rules = self.send(torch.tensor(whole)).unbind(1)
        temperature, top_p, min_p = self.send(torch.tensor(parts, dtype=torch.float64)).unbind(1)
        self.lengths[places] = lengths
        self.seeds[places] = seed
        self.top_k[places] = top_k
        self.rules[places] = rules
        self.temperature[places] = temperature.to(torch.float32)
        self.top_p[places] = top_p
        self.min_p[places] = min_p.to(torch.float32)
        if self._penalties is not None or any(each.penalises for each in params):
            for slot, prompt, each in zip(slots, prompts, params, strict=True):
                self.penalties.open(slot, prompt, each)
        if self._biases is not None or any(each.biased for each in params):
            for slot, prompt, each, own in zip(slots, prompts, params, ends, strict=True):
                self.biases.open(slot, len(prompt), each, own)
        return places

    def send(self, values: Tensor) -> Tensor:
        """Numbers of the host on the device, which is not waited for."""
        if self.device.type == "cuda":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values.to(self.device)

    @contextmanager
    def choosing(self, params: SamplingParams) -> Iterator[None]:
        """As if all slots held sequences that choose so; for measurements, undone afterwards."""
        columns = [value for value in vars(self).values() if isinstance(value, Tensor)]
        before = [column.clone() for column in columns]
        penalties, biases = self._penalties, self._biases
        self._penalties = self._biases = None  # the true ones stay as they are
        try:
            every = list(range(self.count))
            prompts, chosen = [[0]] * self.count, [params] * self.count
            ends: list[tuple[int, ...]] = [()] * self.count
            self.open(every, prompts=prompts, params=chosen, seeds=every, ends=ends)
            yield
        finally:
            self._penalties, self._biases = penalties, biases
            for column, values in zip(columns, before, strict=True):
                column.copy_(values)

    def draws(
        self, slots: Tensor, *, sampled: bool, filtered: bool, uncoupled: bool = False
    ) -> Draws:
        """How these slots' sequences choose, with no more work than some of them needs."""
        if not sampled:
            return Draws()
        rules = self.rules[slots] if uncoupled else None
        draws = Draws(temperature=self.temperature[slots], seeds=self.seeds[slots], rules=rules)
        if not filtered:
            return draws
        return replace(
            draws, top_k=self.top_k[slots], top_p=self.top_p[slots], min_p=self.min_p[slots]
        )


class Biases:
    """Biases of single tokens, and end tokens that a sequence may not choose yet.

    Sequences without any have neutral values, which change no logits.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.bias = torch.zeros(slots, vocabulary, dtype=torch.float32, device=device)
        self.ends = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self.first_end = torch.zeros(slots, dtype=torch.long, device=device)
        """The first position where an end token may stand."""

    def open(
        self, slot: int, prompt: int, params: SamplingParams, end_ids: Collection[int]
    ) -> None:
        """A sequence begins here, after a prompt of so many tokens."""
        if params.logit_bias:
            self.bias[slot] = dense_bias(dict(params.logit_bias), self.bias.shape[1])
        else:
            self.bias[slot].zero_()
        self.first_end[slot] = prompt + params.min_tokens
        if params.min_tokens:
            ids = torch.tensor(sorted(end_ids), dtype=torch.long, device=self.ends.device)
            self.ends[slot].zero_().index_fill_(0, ids, True)

    def apply(
        self,
        logits: Tensor,  # [batch, n, vocabulary]
        slots: Tensor,  # [batch]
        positions: Tensor,  # [batch, n]: of the tokens that the logits follow
    ) -> Tensor:
        """The logits as float32 with each sequence's bias, less the ends that come too early."""
        found = logits.float() + self.bias[slots].unsqueeze(1)
        early = positions + 1 < self.first_end[slots].unsqueeze(1)
        return found.masked_fill_(early.unsqueeze(2) & self.ends[slots].unsqueeze(1), -torch.inf)


class Penalties:
    """Penalties for repeated tokens: a count for each slot and token.

    Sequences without a penalty have neutral values, which change no logits.

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

    def apply(
        self,
        logits: Tensor,
        slots: Tensor,
        block: Tensor | None,
        ancestors: Tensor | None = None,  # [batch, n] int64
    ) -> Tensor:
        """Logits [batch, n, vocabulary] as float32, less the penalties of each token there.

        Position i of a block [batch, n] follows its tokens up to i, or those that are `ancestors`;
        with no block there is one position, right after the prompt.
        """
        counts, prompted = self.counts[slots], self.prompted[slots]  # copies: [batch, vocabulary]
        each = (self.repetition, self.presence, self.frequency)
        repetition, presence, frequency = (column[slots].unsqueeze(1) for column in each)
        once = torch.ones_like(counts[:, :1])
        found = torch.empty_like(logits, dtype=torch.float32)
        before = counts
        for place in range(logits.shape[1]):
            if block is not None and ancestors is not None:
                steps = torch.arange(block.shape[1], device=block.device)
                there = (ancestors[:, place : place + 1] >> steps) & 1
                counts = before.scatter_add(1, block, there.to(before.dtype))
            elif block is not None:
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
