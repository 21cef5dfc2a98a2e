"""`domino info`: what is in a drafter's checkpoint and which target it fits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from domino_spec.cli.options import JsonOption
from domino_spec.cli.voice import speaking

if TYPE_CHECKING:
    from rich.console import Console

    from domino_spec.checkpoints import Check, Description, TargetFacts

_UNKNOWN = "unknown"
_KINDS = {
    "domino": "Domino (backbone and causal head)",
    "markov": "Markov (backbone and bigram head)",
    "dflash": "DFlash (backbone alone)",
}
_VERDICT_STYLES = {"ok": "green", "mismatch": "red", "unknown": "yellow"}


def info(
    draft: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT",
            help="The drafter: a folder, a safetensors file, a hub id or released:NAME.",
        ),
    ],
    *,
    target: Annotated[
        str | None, typer.Option(help="Check whether the drafter fits this target.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The target's hub revision.")] = None,
    draft_revision: Annotated[str | None, typer.Option(help="The drafter's hub revision.")] = None,
    shift_label: Annotated[
        bool | None,
        typer.Option(
            "--shift-label/--no-shift-label",
            help="The alignment of a checkpoint that does not state it.",
        ),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="The mode the target will be used in."),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the target's config brings along."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Describe a drafter without loading its weights; exit code 1 if it does not fit --target."""
    with speaking(as_json=as_json) as voice:
        from domino_spec.checkpoints import check_fit, describe

        facts: TargetFacts | None = None
        checks: list[Check] = []
        if target is not None:
            from domino_spec.targets.place import require_target

            require_target(target, revision=revision)
            from domino_spec.api import read_target_facts

            facts = read_target_facts(
                target, revision=revision, trust_remote_code=trust_remote_code, thinking=thinking
            )
        described = describe(
            draft,
            revision=draft_revision,
            shift_label=shift_label,
            num_target_layers=None if facts is None else facts.num_layers,
        )
        if facts is not None:
            checks = check_fit(described.config, described.provenance, facts)
        verdict = _verdict(checks)
        if as_json:
            voice.document(_document(described, facts, checks, verdict))
        else:
            _print_description(voice.out, described)
            if facts is not None:
                _print_checks(voice.out, facts, checks, verdict)
        if verdict == "mismatch":
            raise typer.Exit(1)


def _verdict(checks: list[Check]) -> str:
    verdicts = {check.verdict for check in checks}
    for worst in ("mismatch", "unknown"):
        if worst in verdicts:
            return worst
    return "ok"


def _print_description(console: Console, described: Description) -> None:
    config, head = described.config, described.config.head
    parameters = described.backbone_parameters + described.head_parameters
    table = _facts_table(described.source)
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
        "sliding layers": _sliding(described),
        "head": "none"
        if head is None
        else f"{head.sizes}, pure draft prefix {head.pure_draft_prefix_len}",
        "block size": config.block_size,
        "alignment": _alignment(described),
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
    _fill(table, rows)
    console.print(table)
    provenance = _facts_table("provenance")
    stated = dataclasses.asdict(described.provenance)
    _fill(provenance, {name.replace("_", " "): value for name, value in stated.items()})
    console.print(provenance)


def _print_checks(console: Console, facts: TargetFacts, checks: list[Check], verdict: str) -> None:
    table = Table(title=f"fit with {facts.name}", title_justify="left", box=None)
    for heading in ("check", "verdict", "drafter has", "target has", "advice"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(
            check.name,
            Text(check.verdict, style=_VERDICT_STYLES[check.verdict]),
            _shown(check.found),
            _shown(check.expected),
            check.advice,
        )
    console.print(table)
    conclusion = {
        "ok": "the drafter fits this target",
        "unknown": "nothing speaks against this target, but not everything is known",
        "mismatch": "the drafter does not fit this target",
    }[verdict]
    console.print(Text(conclusion, style=_VERDICT_STYLES[verdict]))


def _facts_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _fill(table: Table, rows: dict[str, Any]) -> None:
    for name, value in rows.items():
        table.add_row(name, _shown(value))


def _shown(value: Any) -> str:
    if value is None:
        return _UNKNOWN
    text = str(value)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 100_000 else f"{count:,}"


def _kind(described: Description) -> str:
    head = described.config.head
    return "dflash" if head is None else head.kind


def _alignment(described: Description) -> str:
    if described.config.shift_label:
        return "shift: slot 0 predicts the token after the anchor"
    return "no-shift: slot 1 predicts the token after the anchor"


def _sliding(described: Description) -> str:
    config = described.config
    layers = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    if not layers:
        return "none"
    inside = "causal" if config.causal_window else "bidirectional"
    return f"{', '.join(map(str, layers))} (window {config.sliding_window}, {inside} in the block)"


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
