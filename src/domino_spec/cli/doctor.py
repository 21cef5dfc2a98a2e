"""`domino doctor`: what is wrong with a target, a drafter and this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import (
    ChatOptions,
    OneDraftOptions,
    TargetArgument,
    device_of,
    load_decoder,
    require_places,
    resolved_dtype,
    with_own_blocks,
)
from domino_spec.cli.render import STYLES, table
from domino_spec.doctor.settings import Plans
from domino_spec.settings import TargetOptions

if TYPE_CHECKING:
    import torch

    from domino_spec.doctor.reading import Finding


@command()
def doctor(
    voice: Voice,
    target: TargetArgument,
    *,
    draft_options: OneDraftOptions,
    plans: Plans,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> None:
    """Examine a target, a drafter and this machine; exit code 1 if there is a problem.

    Files are read first. Then the target answers a few prompts, and the drafter is tried on them
    as configured and, if it is a block drafter, with the other alignment and other mask tokens.
    """
    require_places(voice, target, target_options.revision, draft=draft_options)

    from domino_spec.doctor.measuring import examine_loaded
    from domino_spec.doctor.reading import is_hopeless, worst
    from domino_spec.drafters import short_name

    target_options = with_own_blocks(voice, target, target_options)
    findings = _read(target, draft_options, plans, chat, target_options)
    if plans.measure and is_hopeless(findings):
        voice.note("not measured: such a pair cannot be loaded here")
    elif plans.measure:
        decoder = load_decoder(voice, target, target_options, draft_options, chat)
        fits = any(f.name == "chat template" and f.state == "ok" for f in findings)
        findings += examine_loaded(decoder, plans, template_fits=fits, say=voice.status)
    state = worst(findings)
    if voice.as_json:
        voice.document(
            {
                "target": short_name(target),
                "drafter": short_name(draft_options.draft),
                "state": state,
                "findings": [vars(finding) for finding in findings],
                "warnings": voice.warnings,
            }
        )
    else:
        heads = ("", "what", "found", "expected", "what to do")
        rows = [(f.state, f.name, f.found, f.expected, f.advice) for f in findings]
        voice.out.print(table(heads, rows, words=heads))
        counts = {s: sum(f.state == s for f in findings) for s in ("problem", "warning")}
        said = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
        voice.say(", ".join(said) or "nothing to complain about", STYLES[state])
    if state == "problem":
        raise typer.Exit(1)


def _read(
    target: str,
    draft_options: OneDraftOptions,
    plans: Plans,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> list[Finding]:
    from domino_spec.api import read_target_facts
    from domino_spec.doctor.reading import examine_files
    from domino_spec.drafters import describe_drafter
    from domino_spec.targets import load_config, load_tokenizer

    device = device_of(target_options.device)
    place: dict[str, Any] = {
        "revision": target_options.revision,
        "trust_remote_code": target_options.trust_remote_code,
        "weights": target_options.quantize != "keep",
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
        plans=plans,
        quantize=target_options.quantize,
    )


def _dtype(options: TargetOptions, config: Any, device: torch.device) -> torch.dtype:
    """The type in which the target would be loaded."""
    import torch

    if options.quantize is not None and device.type == "cpu":
        return torch.float32
    wanted = resolved_dtype(options.dtype)
    if isinstance(wanted, torch.dtype):
        return wanted
    if callable(wanted):
        return wanted(config, device)
    if wanted is None and device.type == "cpu":
        return torch.float32
    stored = getattr(config.get_text_config(), "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32
