"""`domino audit`: is decoding with this drafter lossless?"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_types import Ge, Le

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import (
    ChatOptions,
    EngineName,
    OneDraftOptions,
    TargetArgument,
    load_decoder,
    require_places,
)
from domino_spec.cli.render import STYLES, table
from domino_spec.errors import InputError
from domino_spec.settings import AcceptRule, Settings, TargetOptions, setting

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.audit import GreedyAudit, SamplingAudit, Way
    from domino_spec.decoding import SamplingParams
    from domino_spec.evaluation import PromptSet

_what = partial(setting, group="Audit")
_greedy = partial(setting, group="Greedy part")
_sampling = partial(setting, group="Sampling part")
_LISTED = 20
_ANSWERS = {
    "lossless": "lossless: nothing speaks against it",
    "bug": "not lossless",
    "unclear": "cannot tell",
}


class AuditSettings(Settings):
    """What is audited, and how."""

    engine: EngineName = _what(
        "auto",
        "the loop that is audited: fast is the engine, reference the loop through Transformers; "
        "auto: the engine where it can run this",
    )
    prompts: tuple[str, ...] = _what(
        (),
        '`maths`, code, chat (built in), JSON lines of {"turns": [...]} or hf:NAME[:SPLIT]; '
        "repeatable; unset: fifty of our own",
    )
    batch_size: Annotated[int, Ge(1)] = _what(8, "sequences decoded together")
    limit: Annotated[int, Ge(0)] = _greedy(50, "prompts; 0: no greedy part")
    tokens: Annotated[int, Ge(1)] = _greedy(256, "new tokens a prompt")
    samples: Annotated[int, Ge(0)] = _sampling(200, "samples a prompt; 0: no such part")
    sampled_prompts: Annotated[int, Ge(1)] = _sampling(3, "prompts that are sampled")
    positions: Annotated[int, Ge(2)] = _sampling(6, "tokens a sample")
    temperature: float = _sampling(1.0, "of every sample", flags=("-t",))
    top_k: int = _sampling(0, "0 is off")
    top_p: float = _sampling(1.0, "1 is off")
    min_p: float = _sampling(0.0, "0 is off")
    accept: AcceptRule = _sampling("block", "how drafts are accepted")
    seed: Annotated[int, Ge(0)] = _sampling(0, "the same one, the same answer")
    alpha: Annotated[float, Ge(1e-4), Le(0.2)] = _sampling(
        0.01, "what would look so wrong by chance so rarely is sampled again; twice is a bug"
    )

    def params(self) -> SamplingParams:
        """The checked parameters."""
        from domino_spec.decoding import SamplingParams

        names = ("temperature", "top_k", "top_p", "min_p", "seed", "accept")
        return SamplingParams(**{name: getattr(self, name) for name in names})


@command(failure=2)
def audit(
    voice: Voice,
    target: TargetArgument,
    *,
    settings: AuditSettings,
    draft_options: OneDraftOptions,
    out: Annotated[Path | None, typer.Option(help="Append the record to this file.")] = None,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> None:
    """Prove decoding with a drafter lossless: exit code 0 yes, 1 a bug, 2 cannot tell.

    Greedy output is compared with plain decoding token by token, samples with the target's own
    probabilities. Every difference is listed and judged: a numerical near-tie, or a bug.
    """
    revision = target_options.revision
    require_places(voice, target, revision, draft=draft_options, prompts=settings.prompts)

    from domino_spec.api.prompts import check_system
    from domino_spec.audit import PROMPTS, Audit, audit_greedy, audit_sampling
    from domino_spec.bench.tasks import Task, read_tasks, task_of
    from domino_spec.drafters import short_name
    from domino_spec.records import append_record, environment

    params = settings.params()
    task = task_of("built-in", PROMPTS, system=chat.system)
    if settings.prompts:  # all as one task
        tasks = read_tasks(settings.prompts, system=chat.system, notice=voice.warn)
        rows = tuple(row for each in tasks for row in each.rows)
        task = Task(", ".join(each.name for each in tasks), rows)
    decoder = load_decoder(voice, target, target_options, draft_options, chat)
    opened = decoder.drafter
    if opened is None:
        raise InputError(f"{draft_options.draft} drafts nothing; name a drafter with --draft.")
    check_system(chat.system, decoder.tokenizer)
    context = decoder.target.context_length
    longest = sys.maxsize if context is None else context - settings.tokens
    found = task.encoded(decoder.tokenizer, longest=longest, chat_options=decoder.chat_options)
    if not found.prompts:
        raise InputError(
            f"no prompt leaves room for {settings.tokens} tokens in a context of {context}; ask "
            "for fewer with --tokens."
        )
    way = _way(voice, decoder, settings, found)
    audited = Audit(greedy=None, sampling=None)

    def keep(greedy: GreedyAudit) -> None:
        nonlocal audited
        audited = replace(audited, greedy=greedy)

    try:
        if settings.limit:
            audit_greedy(
                decoder.target,
                way,
                found.prompts[: settings.limit],
                max_new_tokens=settings.tokens,
                eos=decoder.eos_token_ids,
                say=voice.status,
                on_progress=keep,
            )
        if settings.samples:
            sampling = audit_sampling(
                decoder.target,
                way,
                found.prompts[: settings.sampled_prompts],
                params=params,
                samples=settings.samples,
                positions=settings.positions,
                alpha=settings.alpha,
                say=voice.status,
            )
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
        "dtype": decoder.target.dtype_name,
        "device": str(decoder.target.device),
        "prompts": found.name,
        "too_long": found.too_long,
        "new_tokens": settings.tokens,
        **audited.to_dict(),
    }
    if out is not None:
        append_record(out, {**document, "environment": environment()})
    if voice.as_json:
        voice.document({**document, "warnings": voice.warnings})
    else:
        if audited.greedy is not None:
            _print_greedy(voice, audited.greedy)
        if audited.sampling is not None:
            _print_sampling(voice, audited.sampling)
        line = "; ".join([_ANSWERS[audited.answer], *audited.reasons])
        voice.say(line, STYLES[audited.answer])
    if audited.interrupted:
        raise KeyboardInterrupt
    if audited.exit_code:
        raise typer.Exit(audited.exit_code)


def _way(
    voice: Voice,
    decoder: DominoDecoder,
    settings: AuditSettings,
    prompts: PromptSet,
) -> Way:
    from domino_spec.audit import EngineWay, ReferenceWay
    from domino_spec.engine.engine import Engine

    reason: str | None = "it was asked for"
    if settings.engine != "reference":
        reason = decoder.unsupported_reason()
    if reason is None:
        voice.status("the engine is audited")
        capacity = max(map(len, prompts.prompts)) + settings.tokens
        slots = settings.batch_size
        return EngineWay(Engine(decoder.target, decoder.drafter, slots=slots, capacity=capacity))
    if settings.engine == "fast":
        raise InputError(f"the engine cannot be audited: {reason}. Take --engine reference.")
    voice.status(f"the reference loop is audited: {reason}")
    return ReferenceWay(decoder.target, decoder.drafter, batch_size=settings.batch_size)


def _print_greedy(voice: Voice, greedy: GreedyAudit) -> None:
    voice.say(
        f"greedy: {greedy.tokens} tokens of {greedy.prompts} prompts compared with plain decoding, "
        f"{len(greedy.differences)} differ ({greedy.count('tie')} near-ties, "
        f"{greedy.count('bug')} bugs, {greedy.count('unclear')} unclear) · "
        f"acceptance length {greedy.stats.tokens_per_cycle:.2f}"
    )
    if not greedy.differences:
        return
    # What matters first; a page of ties says no more than their number.
    order = sorted(greedy.differences, key=lambda d: d.verdict == "tie")
    heads = tuple(vars(order[0]))
    rows = [tuple(vars(each).values()) for each in order[:_LISTED]]
    voice.out.print(table(heads, rows, words=("verdict", "why")))
    if len(order) > _LISTED:
        voice.say(f"… and {len(order) - _LISTED} more; --json lists them all")


def _print_sampling(voice: Voice, sampling: SamplingAudit) -> None:
    smallest = min((place.adjusted for place in sampling.places), default=1.0)
    seen = "even a total variation of 1 at one place might have been missed"
    if sampling.detectable is not None:
        seen = f"a total variation of {sampling.detectable:.2f} at one place would have been found"
    voice.say(
        f"sampling: {sampling.samples} samples at each of {len(sampling.places)} places "
        f"(temperature {sampling.params.temperature:g}, {sampling.params.accept}), smallest "
        f"adjusted p {smallest:.3g} · {seen} · false alarms {sampling.false_alarm:.4%}"
    )
    for place in (place for place in sampling.places if place.again is not None):
        verdict = "wrong again" if place in sampling.wrong else "not again"
        voice.say(
            f"  prompt {place.prompt}, position {place.position}: adjusted p {place.adjusted:.3g}, "
            f"on fresh samples {place.again:.3g}: {verdict}"
        )
