"""Greedy decoding held against plain decoding, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from domino_spec.audit.forwards import PlainReader
from domino_spec.audit.ties import Difference, judge
from domino_spec.audit.ways import Way, Written
from domino_spec.decoding import RowStats, SamplingParams
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class GreedyAudit:
    """What was compared, and every difference."""

    prompts: int
    tokens: int
    """Tokens compared."""
    differences: tuple[Difference, ...]
    stats: RowStats

    def count(self, verdict: str) -> int:
        """How many differences were judged so."""
        return sum(difference.verdict == verdict for difference in self.differences)

    @property
    def differing_prompts(self) -> int:
        """Prompts with a difference."""
        return len({difference.prompt for difference in self.differences})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "differing_prompts": self.differing_prompts,
            "ties": self.count("tie"),
            "bugs": self.count("bug"),
            "unclear": self.count("unclear"),
            "differences": [difference.to_dict() for difference in self.differences],
            **self.stats.to_dict(),
        }


def audit_greedy(
    target: Target,
    way: Way,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    say: Callable[[str], None] = lambda _: None,
) -> GreedyAudit:
    """Decode with drafts, then read each text plainly and compare every token.

    Behind a tie the comparison goes on with the text that was written: each of its tokens is what
    plain decoding would choose there. Behind a bug it ends.
    """
    say(f"decoding {len(prompts)} prompts with drafts")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    written = way.write(prompts, params, eos=eos)
    differences: list[Difference] = []
    tokens, stats = 0, RowStats()
    say(f"reading {sum(len(w.tokens) for w in written)} tokens plainly")
    for index, (prompt, text) in enumerate(zip(prompts, written, strict=True)):
        found, compared = _follow(target, way, index, prompt, text, max_new_tokens, eos)
        differences += found
        tokens += compared
        stats.add(text.stats)
    return GreedyAudit(
        prompts=len(prompts), tokens=tokens, differences=tuple(differences), stats=stats
    )


def _follow(
    target: Target,
    way: Way,
    index: int,
    prompt: Sequence[int],
    text: Written,
    max_new_tokens: int,
    eos: Collection[int],
) -> tuple[list[Difference], int]:
    """Differences of one text, and how many of its tokens were compared."""
    found: list[Difference] = []
    reader = PlainReader(target)
    single = reader.read(prompt)
    for position, token in enumerate(text.tokens):
        if position == max_new_tokens or (position and text.tokens[position - 1] in eos):
            why = "decoding went on where plain decoding ends"
            return [*found, _ending(index, position, None, token, why)], position
        if int(single.argmax()) != token:
            ids = [*prompt, *text.tokens[:position]]
            found.append(
                judge(
                    target,
                    way,
                    prompt=index,
                    position=position,
                    ids=ids,
                    single=single,
                    found=token,
                    passes=text.passes,
                )
            )
            if found[-1].verdict == "bug":
                return found, position + 1
        if position + 1 < len(text.tokens):
            single = reader.read([token])
    count = len(text.tokens)
    if count < max_new_tokens and (not count or text.tokens[-1] not in eos):
        plain = int(reader.read(text.tokens[-1:]).argmax()) if count else int(single.argmax())
        why = "decoding ended where plain decoding goes on"
        found.append(_ending(index, count, plain, None, why))
    return found, count


def _ending(
    prompt: int, position: int, plain: int | None, found: int | None, why: str
) -> Difference:
    return Difference(
        prompt=prompt, position=position, plain=plain, found=found, gap=None, bound=None,
        verdict="bug", why=why,
    )  # fmt: skip
