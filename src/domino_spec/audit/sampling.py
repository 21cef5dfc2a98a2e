"""Sampling held against the target's own probabilities, place by place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domino_spec.audit.chance import (
    LEAST_EXPECTED,
    CountTest,
    Group,
    after_many_texts,
    after_one_text,
    holm,
    run_test,
)
from domino_spec.audit.forwards import ShapedReader
from domino_spec.audit.ways import Way
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.errors import InputError
from domino_spec.targets import Target

_FRESH = 1 << 40
_APART = 1 << 20
"""How far apart the seeds of prompts, and of a second look at them, lie."""
_TOKENS_A_FORWARD = 512
Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlaceResult:
    """One place of one prompt."""

    prompt: int
    position: int
    test: CountTest
    adjusted: float
    """Holm's over all places."""
    again: float | None = None
    """Holm's on fresh samples, where the first ones looked wrong."""


@dataclass(frozen=True, kw_only=True)
class SamplingAudit:
    """All places. A place is wrong if it looks wrong twice, on independent samples."""

    params: SamplingParams
    samples: int
    alpha: float
    places: tuple[PlaceResult, ...]
    stats: AcceptanceStats

    @property
    def wrong(self) -> tuple[PlaceResult, ...]:
        """Places where the distribution is not the target's."""
        return tuple(p for p in self.places if p.again is not None and p.again <= self.alpha)

    @property
    def false_alarm(self) -> float:
        """How often a right decoder would be called wrong, over all seeds."""
        return self.alpha**2

    @property
    def detectable(self) -> float | None:
        """Total variation at one place that half of the places would have shown."""
        each = [math.inf if p.test.detectable is None else p.test.detectable for p in self.places]
        middle = sorted(each)[len(each) // 2] if each else math.inf
        return None if middle == math.inf else middle

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        names = ("temperature", "top_k", "top_p", "min_p", "accept", "seed")
        return {
            **{name: getattr(self.params, name) for name in names},
            "samples": self.samples,
            "alpha": self.alpha,
            "false_alarm": self.false_alarm,
            "detectable": self.detectable,
            "wrong": len(self.wrong),
            "places": [
                {
                    "prompt": place.prompt,
                    "position": place.position,
                    **vars(place.test),
                    "adjusted": place.adjusted,
                    "again": place.again,
                }
                for place in self.places
            ],
            **self.stats.to_dict(),
        }


def audit_sampling(
    target: Target,
    way: Way,
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams,
    samples: int,
    positions: int,
    alpha: float = 0.01,
    say: Callable[[str], None] = lambda _: None,
) -> SamplingAudit:
    """Sample every prompt many times; compare each of the first positions with the target.

    At a position every sample has a text before it, and the target's probabilities after that
    text are known. Those who share a text are compared with it alone, the rest together. What
    looks wrong is sampled again, and counts only if it looks wrong again.
    """
    if not params.samples or params.seed is None:
        raise InputError(
            f"temperature is {params.temperature} and seed {params.seed}; sampling is audited with "
            "a temperature above 0 and a seed."
        )
    if samples < 2 * LEAST_EXPECTED or positions < 2:
        raise InputError(
            f"{samples} samples of {positions} tokens show nothing; expected at least "
            f"{2 * LEAST_EXPECTED:.0f} of 2 (the first token has no drafts)."
        )
    wanted = [(prompt, place) for prompt in range(len(prompts)) for place in range(positions)]
    stats = AcceptanceStats()

    def look(places: Sequence[Place], *, fresh: bool) -> dict[Place, CountTest]:
        found: dict[Place, CountTest] = {}
        level = alpha / max(len(places), 1)
        for number in sorted({prompt for prompt, _ in places}):
            say(f"sampling prompt {number + 1} {samples} times" + (" more" if fresh else ""))
            seed = (params.seed or 0) + number * _APART + (_FRESH if fresh else 0)
            own = replace(params, seed=seed, max_new_tokens=positions, ignore_eos=True)
            written = way.write([prompts[number]] * samples, own, eos=())
            for text in written:
                stats.add(text.stats)
            texts = [text.tokens for text in written]
            conditionals = _conditionals(target, prompts[number], texts, own)
            for place in (place for prompt, place in places if prompt == number):
                rng = np.random.default_rng((seed, place))
                groups = _groups(texts, conditionals, place, rng)
                test = run_test(groups, level=level, draws=math.ceil(4 / level), rng=rng)
                if test is not None:
                    found[number, place] = test
        return found

    first = look(wanted, fresh=False)
    adjusted = dict(zip(first, holm([test.p for test in first.values()]), strict=True))
    suspects = [place for place in first if adjusted[place] <= alpha]
    second = look(suspects, fresh=True) if suspects else {}
    again = dict(zip(second, holm([test.p for test in second.values()]), strict=True))
    places = tuple(
        PlaceResult(
            prompt=place[0], position=place[1], test=first[place], adjusted=adjusted[place],
            again=again.get(place),
        )
        for place in first
    )  # fmt: skip
    return SamplingAudit(params=params, samples=samples, alpha=alpha, places=places, stats=stats)


def _groups(
    texts: Sequence[tuple[int, ...]],
    conditionals: Mapping[tuple[int, ...], Tensor],
    place: int,
    rng: np.random.Generator,
) -> list[Group]:
    """The samples that share a text before this place, each lot alone, and all others together."""
    tokens = torch.tensor([text[place] for text in texts])
    sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        sharing[text[:place]].append(index)
    groups: list[Group | None] = []
    alone: list[int] = []
    for before, members in sharing.items():
        if len(members) >= 4 * LEAST_EXPECTED:
            groups.append(after_one_text(conditionals[before], tokens[members]))
        else:
            alone += members
    if alone:
        own = torch.stack([conditionals[texts[index][:place]] for index in alone])
        groups.append(after_many_texts(own, tokens[alone], rng))
    return [group for group in groups if group is not None]


@torch.no_grad()
def _conditionals(
    target: Target, prompt: Sequence[int], texts: Sequence[tuple[int, ...]], params: SamplingParams
) -> dict[tuple[int, ...], Tensor]:
    """What the target says comes next after the prompt and each beginning of a text."""
    chain = params.all_processors(prompt_length=len(prompt))
    found: dict[tuple[int, ...], Tensor] = {}

    def keep(before: Sequence[tuple[int, ...]], logits: Tensor) -> None:
        ids = torch.tensor([[*prompt, *text] for text in before], device=logits.device)
        found.update(zip(before, chain(ids, logits).softmax(dim=-1).cpu(), strict=True))

    reader = ShapedReader(target)
    keep([()], reader.read_each([list(prompt)])[:, -1])
    beginnings = sorted({text[:-1] for text in texts})
    step = max(1, _TOKENS_A_FORWARD // len(beginnings[0]))
    for first in range(0, len(beginnings), step):
        chunk = beginnings[first : first + step]
        logits = reader.read_each(chunk)  # [texts, positions - 1, vocabulary]
        reader.cut(len(prompt))
        for place in range(logits.shape[1]):
            new = {text[: place + 1]: row for row, text in enumerate(chunk)}
            keep(list(new), logits[list(new.values()), place])
    return found
