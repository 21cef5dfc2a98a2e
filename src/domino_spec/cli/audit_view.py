"""What an audit found, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from domino_spec.cli.voice import Voice

if TYPE_CHECKING:
    from domino_spec.audit import Audit, GreedyAudit, SamplingAudit

_LISTED = 20
_STYLES = {"lossless": "green", "bug": "red", "unclear": "yellow", "tie": "dim"}


def print_audit(voice: Voice, audited: Audit) -> None:
    """Both halves and the answer, for people."""
    if audited.greedy is not None:
        _print_greedy(voice, audited.greedy)
    if audited.sampling is not None:
        _print_sampling(voice, audited.sampling)
    answer = {
        "lossless": "lossless: nothing speaks against it",
        "bug": "not lossless",
        "unclear": "cannot tell",
    }[audited.answer]
    line = "; ".join([answer, *audited.reasons])
    voice.out.print(Text(line, style=_STYLES[audited.answer]), soft_wrap=True)


def _print_greedy(voice: Voice, greedy: GreedyAudit) -> None:
    voice.out.print(
        f"greedy: {greedy.tokens} tokens of {greedy.prompts} prompts compared with plain decoding, "
        f"{len(greedy.differences)} differ ({greedy.count('tie')} near-ties, "
        f"{greedy.count('bug')} bugs, {greedy.count('unclear')} unclear) · "
        f"acceptance length {greedy.stats.tokens_per_cycle:.2f}",
        soft_wrap=True,
    )
    if not greedy.differences:
        return
    table = Table(box=None)
    for heading in ("prompt", "position", "plain", "found", "gap", "bound"):
        table.add_column(heading, justify="right")
    for heading in ("verdict", "why"):
        table.add_column(heading, overflow="fold")
    # What matters first; a page of ties says no more than their number.
    order = sorted(greedy.differences, key=lambda d: d.verdict == "tie")
    for each in order[:_LISTED]:
        table.add_row(
            *(_shown(v) for v in (each.prompt, each.position, each.plain, each.found)),
            *(_shown(v) for v in (each.gap, each.bound)),
            Text(each.verdict, style=_STYLES[each.verdict]),
            each.why,
        )
    voice.out.print(table)
    if len(order) > _LISTED:
        voice.out.print(f"… and {len(order) - _LISTED} more; --json lists them all")


def _print_sampling(voice: Voice, sampling: SamplingAudit) -> None:
    smallest = min((place.adjusted for place in sampling.places), default=1.0)
    seen = "even a total variation of 1 at one place might have been missed"
    if sampling.detectable is not None:
        seen = f"a total variation of {sampling.detectable:.2f} at one place would have been found"
    voice.out.print(
        f"sampling: {sampling.samples} samples at each of {len(sampling.places)} places "
        f"(temperature {sampling.params.temperature:g}, {sampling.params.accept}), smallest "
        f"adjusted p {smallest:.3g} · {seen} · false alarms {sampling.false_alarm:.4%}",
        soft_wrap=True,
    )
    for place in sampling.places:
        if place.again is None:
            continue
        verdict = "wrong again" if place.again <= sampling.alpha else "not again"
        voice.out.print(
            f"  prompt {place.prompt}, position {place.position}: adjusted p {place.adjusted:.3g}, "
            f"on fresh samples {place.again:.3g}: {verdict}",
            soft_wrap=True,
        )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
