"""`domino info`: what is in a drafter's checkpoint and which target it fits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.render import STYLES, facts_table, table
from domino_spec.settings import Settings, ShiftLabel, setting

if TYPE_CHECKING:
    from domino_spec.checkpoints import Check, Description, TargetFacts

_KINDS = {
    "domino": "Domino (backbone and causal head)",
    "markov": "Markov (backbone and bigram head)",
    "dflash": "DFlash (backbone alone)",
}
_CONCLUSIONS = {
    "ok": "the drafter fits this target",
    "unknown": "nothing speaks against this target, but not everything is known",
    "mismatch": "the drafter does not fit this target",
}


class InfoSettings(Settings):
    """What is described, and compared with which target."""

    draft: str = setting(
        ..., "the drafter: a folder, a safetensors file, a hub id or released:NAME", argument=""
    )
    target: str | None = setting(None, "check whether the drafter fits this target")
    revision: str | None = setting(None, "the target's hub revision")
    draft_revision: str | None = setting(None, "the drafter's hub revision")
    shift_label: ShiftLabel = None
    thinking: bool | None = setting(None, "the mode the target will be used in")
    trust_remote_code: bool = setting(False, "run code that the target's config brings along")


@command()
def info(voice: Voice, settings: InfoSettings) -> None:
    """Describe a drafter without loading its weights; exit code 1 if it does not fit --target."""
    from domino_spec.checkpoints import check_fit, describe

    facts: TargetFacts | None = None
    if settings.target is not None:
        from domino_spec.targets.place import require_target

        require_target(settings.target, revision=settings.revision)
        from domino_spec.api import read_target_facts

        facts = read_target_facts(
            settings.target,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            thinking=settings.thinking,
        )
    described = describe(
        settings.draft,
        revision=settings.draft_revision,
        shift_label=settings.shift_label,
        num_target_layers=None if facts is None else facts.num_layers,
    )
    checks = [] if facts is None else check_fit(described.config, described.provenance, facts)
    verdicts = {check.verdict for check in checks}
    verdict = next((worst for worst in ("mismatch", "unknown") if worst in verdicts), "ok")
    if voice.as_json:
        voice.document(_document(described, facts, checks, verdict))
    else:
        voice.out.print(facts_table(described.source, _facts(described)))
        stated = dataclasses.asdict(described.provenance)
        stated = {name.replace("_", " "): value for name, value in stated.items()}
        voice.out.print(facts_table("provenance", stated))
        if facts is not None:
            heads = ("check", "verdict", "drafter has", "target has", "advice")
            rows = [(c.name, c.verdict, c.found, c.expected, c.advice) for c in checks]
            voice.out.print(table(heads, rows, words=heads, title=f"fit with {facts.name}"))
            voice.say(_CONCLUSIONS[verdict], STYLES[verdict])
    if verdict == "mismatch":
        raise typer.Exit(1)


def _facts(described: Description) -> dict[str, Any]:
    config, head = described.config, described.config.head
    parameters = described.backbone_parameters + described.head_parameters
    sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    inside = "causal" if config.causal_window else "bidirectional"
    rows: dict[str, Any] = {
        "layout": described.layout,
        "kind": _KINDS[_kind(described)],
        "parameters": f"{_millions(parameters)}: backbone "
        f"{_millions(described.backbone_parameters)}, head {_millions(described.head_parameters)}",
        "stored": f"{described.tensor_count} tensors, {described.byte_count / 1e6:,.1f} MB, "
        f"{', '.join(described.dtypes)}",
        **({} if described.packing is None else {"packed": described.packing.summary}),
        "shape": f"{config.num_layers} layers, hidden {config.hidden_size}, intermediate "
        f"{config.intermediate_size}, heads {config.num_heads}, key heads {config.num_kv_heads}, "
        f"head size {config.head_dim}",
        "sliding layers": f"{', '.join(map(str, sliding))} (window {config.sliding_window}, "
        f"{inside} in the block)"
        if sliding
        else "none",
        "head": "none"
        if head is None
        else f"{head.sizes}, pure draft prefix {head.pure_draft_prefix_len}",
        "block size": config.block_size,
        "alignment": "shift: slot 0 predicts the token after the anchor"
        if config.shift_label
        else "no-shift: slot 1 predicts the token after the anchor",
        "drafts a cycle": f"{config.default_depth} by default ({config.default_depth + 1} tokens "
        f"verified), at most {config.max_depth} ({config.max_depth + 1} tokens verified)",
        "captured hidden states": f"layers {', '.join(map(str, config.target_layer_ids))} of "
        f"{config.num_target_layers}",
        "mask token": config.mask_token_id,
        "vocabulary": f"{config.vocab_size:,}"
        if config.draft_vocab_size is None
        else f"reduced to {config.draft_vocab_size:,} of {config.vocab_size:,}",
    }
    if described.revision is not None:
        rows["revision"] = described.revision
    if described.ignored_tensors:
        rows["ignored tensors"] = ", ".join(described.ignored_tensors)
    return rows


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 100_000 else f"{count:,}"


def _kind(described: Description) -> str:
    head = described.config.head
    return "dflash" if head is None else head.kind


def _document(
    described: Description, facts: TargetFacts | None, checks: list[Check], verdict: str
) -> dict[str, Any]:
    config = described.config
    fit = None
    if facts is not None:
        fit = {
            "target": dataclasses.asdict(facts),
            "verdict": verdict,
            "checks": [dataclasses.asdict(check) for check in checks],
        }
    return {
        "source": described.source,
        "revision": described.revision,
        "layout": described.layout,
        "kind": _kind(described),
        "config": config.to_dict(),
        "parameters": {
            "backbone": described.backbone_parameters,
            "head": described.head_parameters,
            "total": described.backbone_parameters + described.head_parameters,
        },
        "tensors": described.tensor_count,
        "bytes": described.byte_count,
        "dtypes": list(described.dtypes),
        "packing": None if described.packing is None else dataclasses.asdict(described.packing),
        "ignored_tensors": list(described.ignored_tensors),
        "alignment": config.alignment,
        "depth": {
            "default": config.default_depth,
            "default_rows_verified": config.default_depth + 1,
            "maximum": config.max_depth,
            "maximum_rows_verified": config.max_depth + 1,
        },
        "provenance": dataclasses.asdict(described.provenance),
        "fit": fit,
    }
