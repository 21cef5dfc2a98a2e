"""Tells a numerical near-tie from a bug where kernels round by the shape of a forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from domino_spec.audit.forwards import PlainReader, ShapedReader, float32_logits
from domino_spec.audit.ways import Pass, Way, Written, block_of
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.quantization.modules import QuantizedLinear
from domino_spec.targets import Target

Verdict = Literal["tie", "bug", "unclear"]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A token that plain decoding would not have chosen after the same text."""

    prompt: int
    position: int
    """Generated tokens before it."""
    plain: int | None
    """None where plain decoding would have ended."""
    found: int | None
    """None where decoding ended."""
    gap: float | None
    """How far apart the two tokens' logits are in float32."""
    bound: float | None
    """Twice the largest difference of any logit there between a single step and the shapes used.

    Where kernels of one's own made the difference: between the model's own type and float32.
    """
    verdict: Verdict
    why: str


def judge(
    target: Target,
    way: Way | None,
    *,
    prompt: int,
    position: int,
    ids: Sequence[int],
    single: Tensor,
    found: int,
    passes: Sequence[Pass],
) -> Difference:
    """Measure one difference: `single` are plain decoding's logits after `ids`, [vocabulary].

    Two roundings of one logit differ by at most the spread, so two tokens can change places only
    if their gap is below twice that. The spread is measured with the model's own forward and
    cache, never with the code that is audited: a broken cache must not excuse itself.

    Kernels of a way's own round elsewhere than the model's, in whatever shape. If they choose the
    found token themselves, over this very text, drafting did not. How far right ones may be off,
    the model tells: its own half-precision logits are off those in float32 too. A gap below twice
    that is a tie, unless the kernels are more than twice as far off.
    """
    plain = int(single.argmax())
    working = float(single[plain] - single[found])
    gap, named, wide = working, "float32", None
    # Products of quantised weights round what they read.
    if target.dtype in _HALF or isinstance(target.lm_head, QuantizedLinear):
        wide = float32_logits(target, ids)
        if wide is None:
            named = "working-type"
        else:
            gap = abs(float(wide[plain] - wide[found]))
    spread = 0.0

    def difference(verdict: Verdict, why: str) -> Difference:
        return Difference(
            prompt=prompt, position=position, plain=plain, found=found, gap=gap, bound=2 * spread,
            verdict=verdict, why=why,
        )  # fmt: skip

    for logits in _in_shapes_used(target, ids, passes):
        spread = max(spread, _furthest(logits, single))
        if gap < 2 * spread:
            return difference("tie", f"the {named} gap is within what the shapes round apart")
    apart: float | None = None
    for own in () if way is None else way.own_logits(ids, passes):
        if apart is None:  # of text read at once: blocks stored wrongly must not excuse themselves
            apart = _furthest(own, single)
        if wide is None:
            break
        off, own_off = _furthest(single, wide), _furthest(own, wide)
        chosen = int(own.argmax())  # of equal ones the first, as decoding takes it
        if chosen == found and gap < 2 * off < math.inf and own_off <= 2 * off:
            spread = off
            return difference(
                "tie",
                "this way's kernels alone choose so over this text, and the float32 gap is within "
                f"what the type rounds: the model is {off:.3g} off float32, they {own_off:.3g}",
            )
    if working < 2 * spread:
        return difference(
            "unclear", "the gap is within the bound in the working type but not in float32"
        )
    if apart is not None and gap < 2 * apart:
        return difference(
            "unclear",
            f"the gap is within twice {apart:.3g}, by which this way's own forward differs from "
            "the model's, but not within the model's own rounding",
        )
    return difference("bug", "no rounding explains it")


def _in_shapes_used(target: Target, ids: Sequence[int], passes: Sequence[Pass]) -> Iterator[Tensor]:
    """Logits after the text: in the last forward's shape, then through all forwards before."""
    position = len(ids) - 1
    shape = next((each for each in passes if each.holds(position)), None)
    if shape is None:
        return

    def read(each: Pass) -> Tensor:
        return reader.read(block_of(ids, each), batch=each.batch, slots=each.slots)

    reader = ShapedReader(target)
    if shape.start:
        reader.read(ids[: shape.start])
    yield read(shape)[position - shape.start]
    reader = ShapedReader(target)
    for each in passes[: passes.index(shape)]:
        read(each)
        reader.cut(each.start + each.kept)
    yield read(shape)[position - shape.start]


def _furthest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@dataclass(frozen=True, kw_only=True)
class GreedyAudit:
    """What was compared, and every difference."""

    prompts: int
    tokens: int
    """Tokens compared."""
    differences: tuple[Difference, ...]
    stats: AcceptanceStats

    def count(self, verdict: str) -> int:
        """How many differences were judged so."""
        return sum(difference.verdict == verdict for difference in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "differing_prompts": len({difference.prompt for difference in self.differences}),
            "ties": self.count("tie"),
            "bugs": self.count("bug"),
            "unclear": self.count("unclear"),
            "differences": [vars(difference) for difference in self.differences],
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
    on_progress: Callable[[GreedyAudit], None] = lambda _: None,
) -> GreedyAudit:
    """Decode with drafts, then read each text plainly and compare every token.

    After a tie the comparison goes on with the text that was written: each of its tokens is what
    plain decoding would choose there. After a bug it ends. `on_progress` gets the audit of the
    prompts compared so far.
    """
    say(f"decoding {len(prompts)} prompts with drafts")
    params = SamplingParams(max_new_tokens=max_new_tokens)
    written = way.write(prompts, params, eos=eos)
    audited = GreedyAudit(prompts=0, tokens=0, differences=(), stats=AcceptanceStats())
    say(f"reading {sum(len(w.tokens) for w in written)} tokens plainly")
    for index, (prompt, text) in enumerate(zip(prompts, written, strict=True)):
        found, compared = _follow(target, way, index, prompt, text, max_new_tokens, eos)
        audited = GreedyAudit(
            prompts=index + 1,
            tokens=audited.tokens + compared,
            differences=(*audited.differences, *found),
            stats=AcceptanceStats.sum((audited.stats, text.stats)),
        )
        on_progress(audited)
    return audited


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

    def ending(position: int, plain: int | None, token: int | None, why: str) -> Difference:
        return Difference(
            prompt=index, position=position, plain=plain, found=token, gap=None, bound=None,
            verdict="bug", why=why,
        )  # fmt: skip

    reader = PlainReader(target)
    single = reader.read(prompt)
    for position, token in enumerate(text.tokens):
        if position == max_new_tokens or (position and text.tokens[position - 1] in eos):
            why = "decoding went on where plain decoding ends"
            return [*found, ending(position, None, token, why)], position
        if int(single.argmax()) != token:
            ids = [*prompt, *text.tokens[:position]]
            found.append(
                judge(
                    target, way, prompt=index, position=position, ids=ids, single=single,
                    found=token, passes=text.passes,
                )
            )  # fmt: skip
            if found[-1].verdict == "bug":
                return found, position + 1
        single = reader.read([token])
    count = len(text.tokens)
    if count < max_new_tokens and (not count or text.tokens[-1] not in eos):
        why = "decoding ended where plain decoding goes on"
        found.append(ending(count, int(single.argmax()), None, why))
    return found, count
