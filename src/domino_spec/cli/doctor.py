"""`domino doctor`: what is wrong with a target, a drafter and this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from domino_spec.cli.loading import checkpoints_among, load_drafter, require_places
from domino_spec.cli.options import (
    AnyDraftOptions,
    ChatOptions,
    JsonOption,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.voice import Voice, speaking

if TYPE_CHECKING:
    import torch

    from domino_spec.doctor import Examination, Finding

_PLANS = "Plans"
_STYLES = {"ok": "green", "unknown": "dim", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the pair is for, and how much is measured."""

    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="The longest sequence you plan, prompt and answer.", rich_help_panel=_PLANS
        ),
    ] = None
    rows: Annotated[
        int, typer.Option(min=1, help="Sequences at a time.", rich_help_panel=_PLANS)
    ] = 1
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Draft for a few answers of the target, or read files alone.",
            rich_help_panel=_PLANS,
        ),
    ] = True
    prompts: Annotated[
        int, typer.Option(min=1, max=50, help="Prompts to measure on.", rich_help_panel=_PLANS)
    ] = 8
    tokens: Annotated[
        int, typer.Option(min=8, help="New tokens of each.", rich_help_panel=_PLANS)
    ] = 32


def doctor(
    target: TargetArgument,
    *,
    draft_options: AnyDraftOptions,
    plans: PlanOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
) -> None:
    """Examine a target, a drafter and this machine; exit code 1 if there is a problem.

    Files are read first. Then the target answers a few prompts, and the drafter is tried on them
    as configured and, if it is a block drafter, with the other alignment and other mask tokens.
    """
    with speaking(as_json=as_json) as voice:
        if draft_options.draft is None:
            raise typer.BadParameter("there is no drafter to examine; give --draft.")
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among([draft_options.draft]),
            draft_revision=draft_options.draft_revision,
        )

        from domino_spec.doctor import Examination
        from domino_spec.drafters import short_name

        read = _read(target, draft_options, plans, chat, target_options)
        findings = list(read.findings)
        if plans.measure and not read.hopeless:
            findings += _measured(
                voice, target, draft_options, plans, chat, target_options, read
            ).findings
        elif plans.measure:
            voice.note("not measured: such a pair cannot be loaded here")
        whole = Examination(findings=tuple(findings))
        if as_json:
            voice.document(
                {
                    "target": short_name(target),
                    "drafter": short_name(draft_options.draft),
                    "state": whole.state,
                    "findings": [finding.to_dict() for finding in whole.findings],
                    "warnings": voice.warnings,
                }
            )
        else:
            _print(voice, whole)
        if whole.state == "problem":
            raise typer.Exit(1)


def _read(
    target: str,
    draft_options: AnyDraftOptions,
    plans: PlanOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> Examination:
    import torch

    from domino_spec.api import read_target_facts
    from domino_spec.cli.options import checked_device
    from domino_spec.doctor import Plans, examine_files
    from domino_spec.drafters import describe_drafter
    from domino_spec.targets import default_device, load_config, load_tokenizer

    assert draft_options.draft is not None
    wanted = checked_device(target_options.device)
    device = default_device() if wanted is None else torch.device(wanted)
    place: dict[str, Any] = {
        "revision": target_options.revision,
        "trust_remote_code": target_options.trust_remote_code,
    }
    config = load_config(target, **place)
    facts = read_target_facts(target, **place, thinking=chat.thinking)
    described = describe_drafter(
        draft_options.draft,
        revision=draft_options.draft_revision,
        shift_label=draft_options.shift_label,
        num_target_layers=facts.num_layers,
    )
    return examine_files(
        config=config,
        tokenizer=load_tokenizer(target, **place),
        facts=facts,
        described=described,
        dtype=_dtype(target_options, config, device),
        device=device,
        plans=Plans(context=plans.context, rows=plans.rows),
    )


def _dtype(options: TargetOptions, config: Any, device: torch.device) -> torch.dtype:
    """The type in which the target would be loaded."""
    import torch

    wanted = None if options.dtype is None else options.dtype.resolved()
    if isinstance(wanted, torch.dtype):
        return wanted
    if callable(wanted):
        return wanted(config, device)
    if wanted is None and device.type == "cpu":
        return torch.float32
    stored = getattr(config.get_text_config(), "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _measured(
    voice: Voice,
    target: str,
    draft_options: AnyDraftOptions,
    plans: PlanOptions,
    chat: ChatOptions,
    target_options: TargetOptions,
    read: Examination,
) -> Examination:
    from domino_spec.audit import PROMPTS
    from domino_spec.doctor import examine_loaded

    template = read.get("chat template")
    decoder, drafts = load_drafter(voice, target, target_options, draft_options, chat)
    return examine_loaded(
        decoder,
        drafts,
        PROMPTS[: plans.prompts],
        tokens=plans.tokens,
        template_fits=template is not None and template.state == "ok",
        say=voice.status,
    )


def _print(voice: Voice, whole: Examination) -> None:
    table = Table(box=None)
    for heading in ("", "what", "found", "expected", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in whole.findings:
        table.add_row(
            Text(finding.state, style=_STYLES[finding.state]),
            finding.name,
            _shown(finding.found),
            _shown(finding.expected),
            finding.advice,
        )
    voice.out.print(table)
    counts = {state: _count(whole.findings, state) for state in ("problem", "warning")}
    said = [f"{count} {state}{'s' * (count > 1)}" for state, count in counts.items() if count]
    line = ", ".join(said) or "nothing to complain about"
    voice.out.print(Text(line, style=_STYLES[whole.state]))


def _count(findings: tuple[Finding, ...], state: str) -> int:
    return sum(finding.state == state for finding in findings)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    text = str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text
