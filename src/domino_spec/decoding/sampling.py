"""How the reference loop chooses a token from the target's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from domino_spec.decoding.noise import gumbel, hashed
from domino_spec.decoding.params import AcceptRule
from domino_spec.decoding.processors import no_token_left
from domino_spec.decoding.sequence import Sequence


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
    """How one sequence chooses tokens: processors, greedy or drawn, its own generator."""

    def __init__(
        self,
        *,
        processors: LogitsProcessorList,
        warpers: LogitsProcessorList,
        samples: bool,
        accept: AcceptRule = "rejection",
        generator: torch.Generator | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        keep_scores: bool = False,
    ) -> None:
        self.processors = processors
        self.warpers = warpers
        self.samples = samples
        self.draws_drafts = samples and accept == "rejection"
        self.couples = samples and accept == "coupled"
        self.generator = generator
        self.seed = seed
        self.scores: list[Tensor] | None = [] if keep_scores else None
        """Processed scores of every committed token, where the caller wants them."""
        self.logits: list[Tensor] | None = [] if keep_scores else None
        self._temperature = temperature
        self._bans = len(processors) > len(warpers)

    @property
    def plain(self) -> bool:
        """Greedy on the raw logits, so that an argmax over the whole block is enough."""
        return not self.samples and not self.processors and self.scores is None

    def keep(self, scores: Tensor, logits: Tensor) -> None:
        """Remember the scores of a committed token, where they are wanted."""
        if self.scores is not None and self.logits is not None:
            self.scores.append(scores.clone())
            self.logits.append(logits.float().clone())

    def choose(
        self,
        ids: Tensor,  # [1, length]: everything committed so far
        logits: Tensor,  # [vocabulary]
        draft: int | None,
        drawn_from: DraftDistribution | None,
    ) -> tuple[Choice, Tensor]:
        """Choose the next token exactly as plain decoding would; also gives the scores."""
        scores = _processed(self.processors, ids, logits)
        if self._bans and not bool((scores > -torch.inf).any()):
            raise no_token_left(ids.shape[1])
        if not self.samples:
            token = int(scores.argmax())
            return Choice(token, token == draft), scores
        if self.couples:
            token = int((scores + self._noise(ids.shape[1], _all_tokens(scores))).argmax())
            return Choice(token, token == draft), scores
        probabilities = scores.softmax(dim=-1)
        if draft is None or drawn_from is None:
            token = self._draw(probabilities)
            return Choice(token, token == draft), scores
        q = drawn_from.dense(probabilities.shape[-1]).to(probabilities.device)
        return self._accept_or_resample(probabilities, q, draft), scores

    def draft(self, logits: Tensor, tokens: Tensor | None) -> tuple[int, DraftDistribution]:
        """Draw a draft's column from the drafter's logits [k], and keep what it was drawn from."""
        scores = _processed(self.warpers, None, logits)
        probabilities = scores.softmax(dim=-1)
        return self._draw(probabilities), DraftDistribution(probabilities, tokens)

    def coupled_draft(self, logits: Tensor, tokens: Tensor | None, position: int) -> int:
        """The column that a draft's logits [k] give with the noise the target will meet there."""
        ids = _all_tokens(logits) if tokens is None else tokens
        return int((logits.float() / self._temperature + self._noise(position, ids)).argmax())

    def _noise(self, position: int, tokens: Tensor) -> Tensor:
        place = tokens.new_tensor(position)
        return gumbel(hashed(tokens.new_tensor(self.seed), place, tokens))

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


def _processed(chain: LogitsProcessorList, ids: Tensor | None, logits: Tensor) -> Tensor:
    """What a chain makes of logits [k]; its own call inspects every signature at every token."""
    scores = logits.float().unsqueeze(0)
    for processor in chain:
        scores = processor(ids, scores)
    return scores[0]


def _all_tokens(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


def make_sampler(sequence: Sequence, device: torch.device, *, keep_scores: bool = False) -> Sampler:
    """The sampler of a sequence, by its parameters and its seed."""
    params = sequence.params
    generator = None
    if params.samples:
        generator = torch.Generator(device=device).manual_seed(sequence.seed)
    return Sampler(
        processors=params.all_processors(len(sequence.seen_prompt)),
        warpers=params.warpers(),
        samples=params.samples,
        accept=params.accept or "rejection",
        generator=generator,
        seed=sequence.seed,
        temperature=float(params.temperature),
        keep_scores=keep_scores,
    )
