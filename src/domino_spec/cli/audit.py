"""`domino audit`: is decoding with this drafter lossless?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from domino_spec.cli.loading import checkpoints_among, load_drafter, require_places
from domino_spec.cli.options import (
    Accept,
    AnyDraftOptions,
    ChatOptions,
    EngineName,
    JsonOption,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.voice import Voice, speaking

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.audit import Audit, GreedyAudit, SamplingAudit, Way
    from domino_spec.bench.tasks import Task
    from domino_spec.decoding import SamplingParams
    from domino_spec.decoding.params import AcceptRule
    from domino_spec.drafters import Drafter
    from domino_spec.evaluation import PromptSet

_WHAT = "Audit"
_GREEDY = "Greedy part"
_SAMPLING = "Sampling part"
_USUAL: dict[str, AcceptRule] = {"fast": "coupled", "reference": "rejection"}


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is audited."""

    engine: Annotated[
        EngineName,
        typer.Option(
            help="The loop that is audited: fast is the engine, reference the loop through "
            "Transformers; auto: the engine where it can run this.",
            rich_help_panel=_WHAT,
        ),
    ] = EngineName.AUTO
    prompts: Annotated[
        list[str],
        typer.Option(
            help='maths, code, chat (built in), JSON lines of {"turns": [...]} or hf:NAME[:SPLIT]; '
            "repeatable; unset: fifty of our own.",
            rich_help_panel=_WHAT,
        ),
    ] = field(default_factory=list)
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences decoded together.", rich_help_panel=_WHAT)
    ] = 8
    limit: Annotated[
        int, typer.Option(min=0, help="Prompts; 0: no greedy part.", rich_help_panel=_GREEDY)
    ] = 50
    tokens: Annotated[
        int, typer.Option(min=1, help="New tokens a prompt.", rich_help_panel=_GREEDY)
    ] = 256


@dataclass(frozen=True, kw_only=True)
class SampledOptions:
    """How sampling is audited."""

    samples: Annotated[
        int,
        typer.Option(min=0, help="Samples a prompt; 0: no such part.", rich_help_panel=_SAMPLING),
    ] = 200
    sampled_prompts: Annotated[int, typer.Option(min=1, rich_help_panel=_SAMPLING)] = 3
    positions: Annotated[
        int, typer.Option(min=2, help="Tokens a sample.", rich_help_panel=_SAMPLING)
    ] = 6
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", rich_help_panel=_SAMPLING)
    ] = 1.0
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=_SAMPLING)] = 1.0
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    accept: Annotated[
        Accept | None,
        typer.Option(
            help="How drafts are accepted; unset: coupled on the engine, rejection in the "
            "reference loop.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, help="The same one, the same answer.", rich_help_panel=_SAMPLING)
    ] = 0
    alpha: Annotated[
        float,
        typer.Option(
            min=1e-4, max=0.2, rich_help_panel=_SAMPLING,
            help="What would look so wrong by chance so rarely is sampled again; twice is a bug.",
        ),
    ] = 0.01  # fmt: skip

    def params(self) -> SamplingParams:
        """The checked parameters; the accept rule may be left to the loop."""
        from domino_spec.decoding import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            accept=None if self.accept is None else self.accept.value,
        )


def audit(
    target: TargetArgument,
    *,
    what: AuditOptions,
    sampled: SampledOptions,
    draft_options: AnyDraftOptions,
    out: Annotated[Path | None, typer.Option(help="Append the record to this file.")] = None,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
) -> None:
    """Prove decoding with a drafter lossless: exit code 0 yes, 1 a bug, 2 cannot tell.

    Greedy output is compared with plain decoding token by token, samples with the target's own
    probabilities. Every difference is listed and judged: a numerical near-tie, or a bug.
    """
    with speaking(as_json=as_json, failure=2) as voice:
        if draft_options.draft is None:
            raise typer.BadParameter("there is no drafter to audit; give --draft.")
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among([draft_options.draft]),
            draft_revision=draft_options.draft_revision,
            prompts=what.prompts,
        )

        from domino_spec.audit import Audit
        from domino_spec.bench.tasks import check_system
        from domino_spec.drafters import short_name
        from domino_spec.records import append_record, environment

        params = sampled.params()
        task = _task(voice, what, system=chat.system)
        decoder, opened = load_drafter(voice, target, target_options, draft_options, chat)
        check_system(chat.system, decoder.tokenizer)
        prompts = _encoded(decoder, task, what)
        asked = params if sampled.samples else None
        way = _way(voice, decoder, opened, what, prompts, asked)
        params = replace(params, accept=params.accept or _USUAL[way.name])
        audited = Audit(greedy=None, sampling=None)

        def keep(greedy: GreedyAudit) -> None:
            nonlocal audited
            audited = replace(audited, greedy=greedy)

        try:
            if what.limit:
                keep(_greedy(voice, decoder, way, what, prompts, on_progress=keep))
            if sampled.samples:
                sampling = _sampling(voice, decoder, way, sampled, params, prompts)
                audited = replace(audited, sampling=sampling)
        except KeyboardInterrupt:  # what is compared is worth keeping; the exit code stays
            if audited.greedy is None:
                raise
            audited = replace(audited, interrupted=True)
        document = {
            "target": short_name(target),
            "drafter": opened.name,
            "kind": opened.kind,
            "engine": way.name,
            "rows": way.batch_size,
            "depth": opened.depth,
            "dtype": str(decoder.target.dtype).removeprefix("torch."),
            "device": str(decoder.target.device),
            "prompts": prompts.name,
            "too_long": prompts.too_long,
            "new_tokens": what.tokens,
            **audited.to_dict(),
        }
        if out is not None:
            append_record(out, {**document, "environment": environment()})
        if as_json:
            voice.document({**document, "warnings": voice.warnings})
        else:
            print_audit(voice, audited)
        if audited.interrupted:
            raise KeyboardInterrupt
        if audited.exit_code:
            raise typer.Exit(audited.exit_code)


def _task(voice: Voice, what: AuditOptions, *, system: str | None) -> Task:
    """All prompts as one; what is wrong with them is found out before anything is loaded."""
    from domino_spec.audit import PROMPTS
    from domino_spec.bench.tasks import Task, read_tasks, task_of

    if not what.prompts:
        return task_of("built-in", PROMPTS, system=system)
    tasks = read_tasks(what.prompts, system=system, notice=voice.warn)
    rows = tuple(row for task in tasks for row in task.rows)
    return Task(", ".join(task.name for task in tasks), rows)


def _encoded(decoder: DominoDecoder, task: Task, what: AuditOptions) -> PromptSet:
    from domino_spec.errors import InputError

    context = decoder.target.context_length
    longest = sys.maxsize if context is None else context - what.tokens
    found = task.encoded(decoder.tokenizer, longest=longest, chat_options=decoder.chat_options)
    if not found.prompts:
        raise InputError(
            f"no prompt leaves room for {what.tokens} tokens in a context of {context}; ask for "
            "fewer with --tokens."
        )
    return found


def _way(
    voice: Voice,
    decoder: DominoDecoder,
    opened: Drafter,
    what: AuditOptions,
    prompts: PromptSet,
    sampled: SamplingParams | None,
) -> Way:
    from domino_spec.audit import EngineWay, ReferenceWay
    from domino_spec.engine.engine import Engine
    from domino_spec.engine.sampling import unsupported_reason
    from domino_spec.errors import InputError
    from domino_spec.evaluation.runs import unsupported_by_engine

    reason: str | None = "it was asked for"
    if what.engine is not EngineName.REFERENCE:
        reason = unsupported_by_engine(decoder.target, opened)
        if reason is None and sampled is not None:
            reason = unsupported_reason(sampled)
    if reason is not None:
        if what.engine is EngineName.FAST:
            raise InputError(f"the engine cannot be audited: {reason}. Take --engine reference.")
        voice.status(f"the reference loop is audited: {reason}")
        return ReferenceWay(decoder.target, opened, batch_size=what.batch_size)
    voice.status("the engine is audited")
    engine = Engine(
        decoder.target,
        opened,
        slots=what.batch_size,
        capacity=max(map(len, prompts.prompts)) + what.tokens,
    )
    return EngineWay(engine)


def _greedy(
    voice: Voice,
    decoder: DominoDecoder,
    way: Way,
    what: AuditOptions,
    prompts: PromptSet,
    *,
    on_progress: Callable[[GreedyAudit], None],
) -> GreedyAudit:
    from domino_spec.audit import audit_greedy

    return audit_greedy(
        decoder.target,
        way,
        prompts.prompts[: what.limit],
        max_new_tokens=what.tokens,
        eos=decoder.eos_token_ids,
        say=voice.status,
        on_progress=on_progress,
    )


def _sampling(
    voice: Voice,
    decoder: DominoDecoder,
    way: Way,
    sampled: SampledOptions,
    params: SamplingParams,
    prompts: PromptSet,
) -> SamplingAudit:
    from domino_spec.audit import audit_sampling

    return audit_sampling(
        decoder.target,
        way,
        prompts.prompts[: sampled.sampled_prompts],
        params=params,
        samples=sampled.samples,
        positions=sampled.positions,
        alpha=sampled.alpha,
        say=voice.status,
    )


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
