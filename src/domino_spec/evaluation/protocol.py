"""The standard measurement: which prompts and answers count, and what is summed over them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from domino_spec.api import DominoDecoder
from domino_spec.data import Corpus, is_loop
from domino_spec.decoding import AcceptanceStats, Drafter, RunStats, SamplingParams
from domino_spec.drafter import DraftModel
from domino_spec.drafter.masks import Window
from domino_spec.drafters import BlockDrafter
from domino_spec.errors import InputError
from domino_spec.evaluation.continuations import Continuations, continue_prompts
from domino_spec.evaluation.runs import Progress, decode_prompts
from domino_spec.evaluation.simulate import simulate, without_head
from domino_spec.settings import AcceptRule
from domino_spec.targets import Target

Outcome = Literal["used", "short", "loop"]
Way = Literal["simulated", "decoded"]


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts of one set, and where in their source each stood."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    """From 0, in the order of the source; those left out leave gaps."""
    too_long: int = 0

    @classmethod
    def of(cls, name: str, prompts: Iterable[Sequence[int]], *, longest: int) -> PromptSet:
        """Leave out what is longer than `longest` tokens, and count it."""
        every = [tuple(prompt) for prompt in prompts]
        kept = [number for number, prompt in enumerate(every) if len(prompt) <= longest]
        return cls(name, tuple(every[n] for n in kept), tuple(kept), len(every) - len(kept))


def corpus_prompts(
    name: str, corpus: Corpus, *, longest: int, limit: int | None = None
) -> PromptSet:
    """What stands before each conversation's first answer; a prompt met before is left out."""
    starts = ((index, corpus.first_supervised(index)) for index in range(len(corpus)))
    found = {tuple(corpus[index].tokens[:start].tolist()): None for index, start in starts if start}
    if not found:
        raise InputError(f"{name} has no conversation with a prompt; expected chats, not texts.")
    return PromptSet.of(name, list(found)[:limit], longest=longest)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is measured. Two figures compare only if they share these."""

    longest_prompt: int = 399
    max_new_tokens: int = 256
    shortest_answer: int = 32
    """Shorter answers say little and are left out."""
    temperature: float = 0.0
    seed: int = 0
    """Prompt i draws from seed + i."""

    def longest_for(self, target: Target) -> int:
        """The longest prompt that counts and can be finished."""
        context = target.context_length
        if context is None:
            return self.longest_prompt
        return min(self.longest_prompt, context - self.max_new_tokens)

    def outcome(self, answer: Sequence[int]) -> Outcome:
        """Whether an answer counts: a model that repeats itself would flatter any drafter."""
        if len(answer) < self.shortest_answer:
            return "short"
        return "loop" if is_loop(answer) else "used"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One drafter on one set of prompts."""

    prompts: PromptSet
    protocol: Protocol
    way: Way
    accept: AcceptRule | None
    """How drafts were accepted; None when greedy, where there is one way."""
    depth: int
    candidates: int | None
    window: Window | None
    head: bool | None
    """Whether the head corrected; None for drafters that have no such choice."""
    outcomes: tuple[Outcome, ...]
    sequences: tuple[AcceptanceStats, ...]
    """One a prompt, whatever its outcome; those left out of a simulation are empty."""
    seconds: float

    @property
    def total(self) -> AcceptanceStats:
        """All counts of the prompts used."""
        pairs = zip(self.outcomes, self.sequences, strict=True)
        return AcceptanceStats.sum(counts for outcome, counts in pairs if outcome == "used")

    @property
    def counts(self) -> dict[str, int]:
        """How many prompts were used and how many left out, by reason."""
        found = Counter(self.outcomes)
        return {
            "used": found["used"],
            "loops": found["loop"],
            "short": found["short"],
            "too_long": self.prompts.too_long,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record: the sums, and a column for each count of each prompt."""
        return {
            "set": self.prompts.name,
            "way": self.way,
            "accept": self.accept,
            "depth": self.depth,
            "candidates": self.candidates,
            "window": self.window,
            "head": self.head,
            "protocol": asdict(self.protocol),
            **self.counts,
            **self.total.to_dict(),
            "per_prompt": {
                "number": list(self.prompts.numbers),
                "outcome": list(self.outcomes),
                "committed": [counts.committed for counts in self.sequences],
                "cycles": [counts.cycles for counts in self.sequences],
            },
            "seconds": self.seconds,
        }


def continuations_for(
    decoder: DominoDecoder, prompts: PromptSet, protocol: Protocol, **options: Any
) -> Continuations:
    """The target's answers under a protocol; one serves the simulation of every drafter."""
    return continue_prompts(
        decoder.target,
        prompts.prompts,
        eos=decoder.eos_token_ids,
        max_new_tokens=protocol.max_new_tokens,
        temperature=protocol.temperature,
        seed=protocol.seed,
        name=prompts.name,
        **options,
    )


def measure_simulated(
    decoder: DominoDecoder,
    prompts: PromptSet,
    protocol: Protocol,
    continuations: Continuations,
    *,
    head: bool = True,
    **options: Any,
) -> Measurement:
    """Simulate decoding: exact when greedy, the `match` rule at a temperature."""
    if continuations.prompts != prompts.prompts:
        raise InputError(
            f"the continuations are of other prompts than {prompts.name}; make them anew."
        )
    start = time.perf_counter()
    outcomes = tuple(protocol.outcome(answer) for answer in continuations.answers)
    used = [index for index, outcome in enumerate(outcomes) if outcome == "used"]
    simulation = simulate(
        _model(decoder),
        decoder.target,
        continuations.select(used),
        depth=decoder.depth,
        candidates=decoder.candidates,
        window=decoder.window,
        head=head,
        **options,
    )
    sequences = [AcceptanceStats() for _ in outcomes]
    for index, counts in zip(used, simulation.sequences, strict=True):
        sequences[index] = counts
    return Measurement(
        prompts=prompts,
        protocol=protocol,
        way="simulated",
        accept="match" if protocol.temperature else None,
        depth=decoder.depth,
        candidates=decoder.candidates,
        window=decoder.window,
        head=head,
        outcomes=outcomes,
        sequences=tuple(sequences),
        seconds=time.perf_counter() - start,
    )


def measure_decoded(
    decoder: DominoDecoder,
    prompts: PromptSet,
    protocol: Protocol,
    *,
    head: bool = True,
    batch_size: int = 16,
    accept: AcceptRule | None = None,
    on_progress: Progress | None = None,
) -> Measurement:
    """Decode for real with a drafter of any kind, on the engine where it can run the pair.

    Every cycle drafts `decoder.depth` tokens: acceptance at a depth that adapts to the machine
    would not compare. `accept` unset is coupled, as the protocol has a seed.
    """
    start, stats = time.perf_counter(), RunStats()
    drafter: Drafter | None = decoder.drafter
    if not head:
        drafter = BlockDrafter(
            without_head(_model(decoder)), candidates=decoder.candidates, window=decoder.window
        )
    fixed = DominoDecoder(
        decoder.target, drafter, decoder.tokenizer, depth=decoder.depth, engine=decoder.choice
    )
    params = SamplingParams(
        max_new_tokens=protocol.max_new_tokens,
        temperature=protocol.temperature,
        seed=protocol.seed,
        accept=accept,
    )
    answers = decode_prompts(
        fixed,
        prompts.prompts,
        params,
        batch_size=batch_size,
        stats=stats,
        on_progress=on_progress,
    )
    return Measurement(
        prompts=prompts,
        protocol=protocol,
        way="decoded",
        accept=params.rule if protocol.temperature else None,
        depth=fixed.depth,
        candidates=decoder.candidates,
        window=decoder.window,
        head=head if isinstance(decoder.drafter, BlockDrafter) else None,
        outcomes=tuple(protocol.outcome(answer.output) for answer in answers),
        sequences=tuple(answer.stats for answer in answers),
        seconds=time.perf_counter() - start,
    )


def _model(decoder: DominoDecoder) -> DraftModel:
    if decoder.drafter is None:
        raise InputError("there is no drafter to measure; load one with draft=...")
    if not isinstance(decoder.drafter, BlockDrafter):
        raise InputError(f"{decoder.drafter.name} is no block drafter; decode for real instead.")
    return decoder.drafter.model
