"""Sampling parameters, and the one place where a token is chosen from the target's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from domino_spec.errors import InputError

AcceptRule = Literal["rejection", "match"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is generated. The defaults are greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Row i of a batch draws from seed + i; None takes a fresh seed from torch's generator."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    """Any Transformers processors, run before temperature and the cut-offs."""
    accept: AcceptRule = "rejection"
    """Both are exact. `rejection` draws drafts from q and accepts with min(1, p/q);
    `match` drafts greedily and accepts while the target's own draw agrees."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "processors", tuple(self.processors))
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected 1 or more.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(
                f"temperature is {self.temperature}; expected 0 (greedy) or a positive number."
            )
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; expected 0 (off) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; expected more than 0 and at most 1 (off).")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; expected 0 (off) to 1.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}; expected a positive number "
                "(1 is off)."
            )
        if any(not stop for stop in self.stop):
            raise InputError("an empty stop string would stop at once; leave it out.")
        if self.accept not in ("rejection", "match"):
            raise InputError(f"accept is {self.accept!r}; expected 'rejection' or 'match'.")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn rather than taken greedily."""
        return self.temperature > 0

    def warpers(self) -> LogitsProcessorList:
        """Temperature and cut-offs: they look at one position's logits only."""
        chain = LogitsProcessorList()
        if not self.samples:
            return chain
        if self.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p > 0.0:
            chain.append(MinPLogitsWarper(float(self.min_p)))
        return chain

    def all_processors(self) -> LogitsProcessorList:
        """Everything applied to the target's logits, in Transformers' own order."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        chain.extend(self.processors)
        chain.extend(self.warpers())
        return chain


@dataclass(frozen=True)
class DraftDistribution:
    """The distribution one draft was drawn from, over these tokens (None = all)."""

    probabilities: Tensor  # [k]
    tokens: Tensor | None  # [k]

    def dense(self, vocab_size: int) -> Tensor:
        """Over the target's whole vocabulary, [vocabulary]."""
        if self.tokens is None:
            return self.probabilities
        full = torch.zeros(vocab_size, device=self.probabilities.device)
        return full.scatter(0, self.tokens, self.probabilities)


@dataclass(frozen=True)
class Choice:
    """A token, and whether it is the draft."""

    token: int
    accepted: bool


class Sampler:
    """One row's rule for choosing tokens: processors, greedy or drawn, its own generator."""

    def __init__(
        self,
        *,
        processors: LogitsProcessorList,
        warpers: LogitsProcessorList,
        samples: bool,
        accept: AcceptRule = "rejection",
        generator: torch.Generator | None = None,
    ) -> None:
        self.processors = processors
        self.warpers = warpers
        self.samples = samples
        self.draws_drafts = samples and accept == "rejection"
        self.generator = generator

    @property
    def plain(self) -> bool:
        """Greedy on the raw logits, so that an argmax over the whole block is enough."""
        return not self.samples and not self.processors

    def choose(
        self,
        ids: Tensor,  # [1, length]: everything committed so far
        logits: Tensor,  # [vocabulary]
        draft: int | None,
        drawn_from: DraftDistribution | None,
    ) -> tuple[Choice, Tensor]:
        """Choose the next token exactly as plain decoding would; also gives the scores."""
        scores = self.processors(ids, logits.float().unsqueeze(0))[0]
        if not self.samples:
            token = int(scores.argmax())
            return Choice(token, token == draft), scores
        probabilities = scores.softmax(dim=-1)
        if draft is None or drawn_from is None:
            token = self._draw(probabilities)
            return Choice(token, token == draft), scores
        q = drawn_from.dense(probabilities.shape[-1]).to(probabilities.device)
        return self._accept_or_resample(probabilities, q, draft), scores

    def draft(self, logits: Tensor, tokens: Tensor | None) -> tuple[int, DraftDistribution]:
        """Draw a draft's column from the drafter's logits [k], and keep what it was drawn from."""
        scores = self.warpers(None, logits.float().unsqueeze(0))[0]
        probabilities = scores.softmax(dim=-1)
        return self._draw(probabilities), DraftDistribution(probabilities, tokens)

    def _accept_or_resample(self, p: Tensor, q: Tensor, draft: int) -> Choice:
        if self._uniform(p.device) * float(q[draft]) < float(p[draft]):
            return Choice(draft, True)
        residual = (p - q).clamp(min=0)
        # p <= q everywhere means p = q up to rounding: then p itself is the residual's limit.
        return Choice(self._draw(residual if float(residual.sum()) > 0 else p), False)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def _uniform(self, device: torch.device) -> float:
        return float(torch.rand((), generator=self.generator, device=device))


def make_sampler(params: SamplingParams, *, row: int, device: torch.device) -> Sampler:
    """The sampler of one row of a run."""
    generator = None
    if params.samples:
        seed = params.seed
        seed = int(torch.randint(2**62, ()).item()) if seed is None else seed + row
        generator = torch.Generator(device=device).manual_seed(seed)
    return Sampler(
        processors=params.all_processors(),
        warpers=params.warpers(),
        samples=params.samples,
        accept=params.accept,
        generator=generator,
    )
