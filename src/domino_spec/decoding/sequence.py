"""One sequence: its prompt, how it is sampled, its output so far, its status and its counts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from domino_spec.decoding.params import SamplingParams
from domino_spec.decoding.stats import AcceptanceStats, RunStats
from domino_spec.errors import InputError
from domino_spec.grammars import Matcher

if TYPE_CHECKING:
    from domino_spec.decoding.branches import VerifiedTree
    from domino_spec.decoding.sampling import Sampler

ABORTED = "abort"
EOS, LENGTH, STOP, CRITERIA = "eos", "length", "stop", "criteria"
"""Reasons to stop: an end token, `max_new_tokens`, a stop string or a grammar's end, criteria."""

StopRule = Callable[["Sequence"], str | None]
"""Looks at a sequence after each token; the reason to stop, or None."""

_ids = itertools.count()


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


class Sequence:
    """What an engine decodes. Only the engine that holds it changes it once it was added."""

    def __init__(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        index: int | None = None,
        stop_rules: Iterable[StopRule] = (),
        eos: Iterable[int] = (),
        seed: int | None = None,
        client: str = "",
        speculate: bool = True,
        reuse: bool = True,
        run: RunStats | None = None,
        seen_prompt: Tokens[int] | None = None,
        matcher: Matcher | None = None,
        multimodal_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """`seed` None takes the parameters' seed + `index`, or a fresh one.

        `eos` are the model's end-of-sequence tokens, which `min_tokens` holds back; rules that stop
        there are among the `stop_rules`. `client` is whom the scheduler is fair to. Without
        `speculate` no draft is made for it, and without `reuse` all of its prompt is computed,
        whatever the caches hold. `run` sums up the counts of several sequences. `seen_prompt` is
        the prompt as processors and criteria see it, where the caller padded it. `matcher` is that
        of the parameters' grammar. `multimodal_inputs` are what the target's prefill takes besides
        token ids, as Transformers' processor made it of the prompt's images.
        """
        if (params.grammar is None) != (matcher is None):
            raise InputError(
                "a sequence with a grammar needs a matcher of it, and no other has one: "
                "GrammarCompiler.compile(params.grammar).matcher()."
            )
        if multimodal_inputs and params.prompt_logprobs is not None:
            raise InputError(
                "prompt_logprobs are asked for of a prompt with images, whose prefill is one pass; "
                "leave them out, or give text alone."
            )
        self.index = next(_ids) if index is None else index
        self.prompt = list(prompt)
        self.seen_prompt = self.prompt if seen_prompt is None else list(seen_prompt)
        self.multimodal_inputs = dict(multimodal_inputs or {})
        """Pixel values and the like; empty for text. Only the reference loop reads them."""
        self.params = params
        self.matcher = matcher
        """Where it is in its grammar; follows what is committed."""
        self.stop_rules = list(stop_rules)
        self.end_ids = params.end_ids(frozenset(eos))
        """Tokens that end it; none of them comes before `min_tokens`."""
        self.seed = params.seed_of(self.index) if seed is None else seed
        self.client = client
        self.speculate = speculate
        self.reuse = reuse and params.prompt_logprobs is None  # they need every token's state
        self.run = run
        self.output: list[int] = []
        self.prompt_scores: list[TokenScore | None] | None = None
        """One a token of the prompt, none for its first, where its parameters ask for them."""
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        """Why it could not be completed, where a rule or the engine failed."""
        self.stats = AcceptanceStats()
        self.cycles = 0
        self.arrived = time.perf_counter()
        self.queued = False
        """Whether an engine has it, waiting or running."""
        # Where its keys and values are, while an engine holds it.
        self.slot: int | None = None
        self.computed = 0
        """Tokens of the prompt whose keys and values are in the caches."""
        self.cached = 0
        """Of these, tokens that were there before it came."""
        self.admitted: float | None = None
        """When it got its slot."""
        self.last_output = self.arrived
        self.listener: Callable[[SequenceOutput], None] | None = None
        """Hears of each of its outputs."""
        self.prompt_reports: list[Callable[[], Tensor]] = []
        """Wait for the scores of each chunk of the prompt, until the engine has collected them."""
        self.sampler: Sampler | None = None
        """How the reference loop chooses its tokens; the engine chooses on the device."""
        self._ids: Tensor | None = None
        self._filled = 0

    @property
    def status(self) -> Status:
        """Waiting, prefill, decoding or finished."""
        if self.finished:
            return Status.FINISHED
        if self.slot is None:
            return Status.WAITING
        return Status.DECODING if self.computed >= len(self.prompt) else Status.PREFILL

    @property
    def finished(self) -> bool:
        """Whether it gets no more tokens."""
        return self.finish_reason is not None or self.error is not None

    @property
    def anchor(self) -> int:
        """The last committed token, whose keys and values do not exist yet."""
        return self.output[-1]

    @property
    def max_length(self) -> int:
        """Tokens it may come to, prompt and output."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def last_position(self) -> int:
        """Where the last token it may generate would stand."""
        return self.max_length - 1

    @property
    def anchor_position(self) -> int:
        """Where its last token stands."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.params.max_new_tokens - len(self.output)

    @property
    def in_cache(self) -> list[int]:
        """Tokens whose keys and values are in the caches for certain: all but the anchor."""
        return self.prompt[: self.computed] + self.output[:-1]

    def ids(self, device: torch.device) -> Tensor:
        """What Transformers' processors and criteria see: prompt and output, [1, length].

        Only what is new goes to the device.
        """
        prompt, output = self.seen_prompt, self.output
        length = len(prompt) + len(output)
        if self._ids is None:
            room = length + self.remaining
            self._ids = torch.zeros(1, room, dtype=torch.long, device=device)
            self._ids[0, : len(prompt)] = torch.tensor(prompt)
            self._filled = len(prompt)
        if self._filled < length:
            new = output[self._filled - len(prompt) :]
            self._ids[0, self._filled : length] = torch.tensor(new)
            self._filled = length
        return self._ids[:, :length]

    def in_text(self, tokens: Tokens[int]) -> Tokens[int]:
        """Tokens just committed without the one that ended the sequence, unless that is shown."""
        shown = self.params.include_stop_str_in_output or not tokens
        return tokens if shown or tokens[-1] not in self.end_ids else tokens[:-1]

    def begin(self) -> None:
        """It gets a slot."""
        self.admitted = time.perf_counter()

    def append(self, token: int) -> None:
        """Commit a token and ask the stop rules, in order; the first reason counts."""
        self.output.append(token)
        if self.matcher is not None:
            self.matcher.commit(token)
            if self.matcher.ended:
                self.finish_reason = EOS if self.matcher.is_end(token) else STOP
        for rule in self.stop_rules:
            reason = rule(self)
            self.finish_reason = self.finish_reason or reason

    def take(self, tokens: Tokens[int]) -> tuple[int, ...]:
        """Commit tokens that were chosen elsewhere, up to the one that ends the sequence."""
        before = len(self.output)
        for token in tokens:
            if self.finish_reason:
                break
            self.append(token)
        return tuple(self.output[before:])

    def end_cycle(
        self, tokens: int, accepted: int, depth: int, ranks: Tokens[int] | None = None
    ) -> int:
        """Count a cycle that verified drafts `depth` deep and committed so many tokens.

        `ranks` are those of a tree's accepted drafts among their siblings. Gives how many positions
        had a chance: those after the sequence's end had none.
        """
        drafts = min(depth, self.remaining + tokens)
        if self.finish_reason and accepted == tokens:
            drafts = accepted
        for stats in (self.stats, None if self.run is None else self.run.acceptance):
            if stats is not None:
                stats.record(drafts=drafts, accepted=accepted, committed=tokens, ranks=ranks)
        return drafts


@dataclass(frozen=True)
class TokenScore:
    """Before temperature, penalties and cut-offs."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the best first, as many as were asked for; with log-probabilities."""
    rank: int | None = None
    """Its place among all tokens, 1 for the likeliest; told of a prompt's tokens."""


def token_scores(
    logprobs: Tensor,  # [n, vocabulary] float32
    tokens: Tokens[int],
    top: int,
    *,
    ranked: bool = False,
) -> tuple[TokenScore, ...]:
    """Scores of the first tokens of a block, as many as there are; if `ranked`, with ranks."""
    kept = logprobs[: len(tokens)]
    values, ids = kept.topk(min(top, kept.shape[1]), dim=-1)
    own = kept.gather(1, kept.new_tensor(tokens, dtype=ids.dtype).unsqueeze(1)).squeeze(1)
    ranks: list[int | None] = [None] * len(own)
    if ranked:
        ranks = ((kept > own.unsqueeze(1)).sum(dim=1) + 1).tolist()
    each = zip(ranks, own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return tuple(TokenScore(one, tuple(zip(*best, strict=True)), rank) for rank, one, *best in each)


@dataclass(slots=True)
class SequenceOutput:
    """What one step committed for one sequence. The leading `accepted` tokens were drafts."""

    sequence: Sequence
    tokens: tuple[int, ...]
    accepted: int
    cycle: int
    """0 is the prefill, whose one token no draft competed for."""
    finish_reason: str | None
    scores: tuple[TokenScore, ...] | None = None
    """One a token, where the sequence's parameters ask for them."""
    drafts: int = 0
    """Drafts that were verified and had a chance."""
    error: Exception | None = None
    """Why the sequence ends here without being complete."""
    tree: VerifiedTree | None = None
    """The drafts themselves, where they were a tree."""


def merged(outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
    """Of each sequence the outputs of several steps as one, for readers who need no cycles.

    An error stays apart from what was committed before it.
    """
    found: list[SequenceOutput] = []
    places: dict[int, int] = {}
    for output in outputs:
        place = places.setdefault(id(output.sequence), len(found))
        if place == len(found) or output.error is not None:
            found.append(output)
            continue
        before = found[place]
        found[place] = replace(
            output,
            tokens=before.tokens + output.tokens,
            accepted=before.accepted + output.accepted,
            scores=None if before.scores is None else before.scores + (output.scores or ()),
            drafts=before.drafts + output.drafts,
            tree=None,
        )
    return found
