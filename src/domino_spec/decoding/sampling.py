"""How the reference loop chooses a token from the target's logits, and accepts drawn drafts."""

from __future__ import annotations

from collections.abc import Sequence as Drafts
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from domino_spec.decoding.noise import (
    ACCEPTS,
    DRAFTS,
    RESAMPLES,
    gumbel,
    hashed_after,
    salted_one,
    uniform_of,
)
from domino_spec.decoding.processors import no_token_left
from domino_spec.decoding.sequence import Sequence
from domino_spec.settings import AcceptRule


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


class Sampler:
    """How one sequence chooses tokens: processors, greedy or drawn, and its accept rule.

    `start` stands for the cycle: the position of its anchor (`noise.salted`).
    """

    def __init__(
        self,
        *,
        processors: LogitsProcessorList,
        bans: bool,
        samples: bool,
        rule: AcceptRule = "coupled",
        seed: int = 0,
        temperature: float = 1.0,
        keep_scores: bool = False,
    ) -> None:
        self.processors = processors
        self.samples = samples
        self.rule = rule
        self.seed = seed
        self.scores: list[Tensor] | None = [] if keep_scores else None
        """Processed scores of every committed token, where the caller wants them."""
        self.logits: list[Tensor] | None = [] if keep_scores else None
        self._temperature = temperature
        self._bans = bans
        self._start = -1
        self._seeds: dict[int, int] = {}

    @property
    def plain(self) -> bool:
        """Greedy on the raw logits, so that an argmax over the whole block is enough."""
        return not self.samples and not self.processors and self.scores is None

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn from the drafter's own distribution, which is then needed."""
        return self.samples and self.rule in ("rejection", "block")

    def keep(self, scores: Tensor, logits: Tensor) -> None:
        """Remember the scores of a committed token, where they are wanted."""
        if self.scores is not None and self.logits is not None:
            self.scores.append(scores.clone())
            self.logits.append(logits.float().clone())

    def processed(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Scores [vocabulary] of the token after `ids` [1, length] from its logits."""
        scores = logits.float().unsqueeze(0)
        for processor in self.processors:  # the list's own call inspects every signature each time
            scores = processor(ids, scores)
        if self._bans and not bool((scores > -torch.inf).any()):
            raise no_token_left(ids.shape[1])
        return scores[0]

    def choose(self, scores: Tensor, position: int) -> int:
        """The token that plain decoding chooses at a position from its scores."""
        if not self.samples:
            return int(scores.argmax())
        return int((scores + self._noise(self.seed, position, scores)).argmax())

    def draft_noise(self, start: int) -> tuple[float, int]:
        """What drafts are chosen with: a temperature, 0 for the best ones, and a seed."""
        if not self.samples or self.rule == "match":
            return 0.0, 0
        seed = self.seed if self.rule == "coupled" else self._cycle(start)[DRAFTS]
        return self._temperature, seed

    def distribution(self, logits: Tensor, tokens: Tensor | None) -> DraftDistribution:
        """What drafts are drawn from: neither cut off nor penalised as the target's scores are."""
        return DraftDistribution(self._scaled(logits).softmax(dim=-1), tokens)

    # Accepting drawn drafts: `p` and `q` are the target's and the drafter's probabilities ---------

    def accept_or_resample(
        self, p: Tensor, q: Tensor | None, draft: int | None, position: int, start: int
    ) -> tuple[int, bool]:
        """Token rejection at one position: the token, and whether it is the accepted draft."""
        if draft is None or q is None:
            return self.draw(p, position, start), False
        if self.uniform(position, start) * float(q[draft]) < float(p[draft]):
            return draft, True
        return self.resample(p, q, position, start), False

    def verify_block(
        self, p: Drafts[Tensor], q: Drafts[Tensor], drafts: Drafts[int], start: int
    ) -> tuple[int, int]:
        """Block verification (arXiv 2403.10444): how many drafts stay, and the token after them.

        `p` has one distribution more than there are drafts. There is no early exit: the last
        success counts.
        """
        count, accepted = len(drafts), 0
        joint = [1.0]
        for i, draft in enumerate(drafts):
            ratio = float(p[i][draft]) / max(float(q[i][draft]), torch.finfo(torch.float32).tiny)
            joint.append(min(joint[-1] * ratio, 1.0))
        for i in range(1, count + 1):
            chance = joint[i]
            if i < count:
                left = float((joint[i] * p[i] - q[i]).clamp(min=0).sum())
                chance = left / (left + 1 - joint[i]) if left > 0 else 0.0
            if self.uniform(start + i, start) < chance:
                accepted = i
        position = start + accepted + 1
        if accepted == count:
            return accepted, self.draw(p[count], position, start)
        scaled = joint[accepted] * p[accepted]
        return accepted, self.resample(scaled, q[accepted], position, start)

    def resample(self, p: Tensor, q: Tensor, position: int, start: int) -> int:
        """A token by max(p - q, 0); where rounding leaves nothing of that, by p itself."""
        left = (p - q).clamp(min=0)
        return self.draw(left if float(left.sum()) > 0 else p, position, start)

    def draw(self, weights: Tensor, position: int, start: int) -> int:
        """A token by its weight."""
        noise = self._noise(self._cycle(start)[RESAMPLES], position, weights)
        return int((weights.log() + noise).argmax())

    def uniform(self, position: int, start: int) -> float:
        """A number between 0 and 1."""
        return uniform_of(self._cycle(start)[ACCEPTS], position)

    def _cycle(self, start: int) -> dict[int, int]:
        """The seeds of a cycle's own draws, by their salts."""
        if start != self._start:
            salts = (DRAFTS, ACCEPTS, RESAMPLES)
            self._start = start
            self._seeds = {salt: salted_one(self.seed, start, salt) for salt in salts}
        return self._seeds

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.float() / self._temperature

    @staticmethod
    def _noise(seed: int, position: int, like: Tensor) -> Tensor:
        ids = torch.arange(len(like), device=like.device)
        return gumbel(hashed_after(seed, position, ids))


def make_sampler(sequence: Sequence, *, keep_scores: bool = False) -> Sampler:
    """The sampler of a sequence, by its parameters and its seed."""
    params = sequence.params
    length, ends = len(sequence.seen_prompt), sequence.end_ids
    processors = params.all_processors(length, ends, sequence.matcher)
    return Sampler(
        processors=processors,
        bans=len(processors) > len(params.warpers()),
        samples=params.samples,
        rule=params.rule,
        seed=sequence.seed,
        temperature=float(params.temperature),
        keep_scores=keep_scores,
    )
