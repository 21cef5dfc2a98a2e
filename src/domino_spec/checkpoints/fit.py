"""Whether a drafter belongs to a target: every fact compared, and unknown where one is lacking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from domino_spec.checkpoints.provenance import Provenance
from domino_spec.drafter.config import DrafterConfig, ModuleConfig
from domino_spec.errors import MismatchError

Verdict = Literal["ok", "mismatch", "unknown"]
AnyConfig = DrafterConfig | ModuleConfig


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a loaded target says about itself; None where it cannot tell."""

    name: str
    revision: str | None = None
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    thinking: str | None = None
    architectures: tuple[str, ...] = ()
    """Names of its model's class, as its configuration has them."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: what the drafter states, what the target is, what to do about it."""

    name: str
    verdict: Verdict
    found: Any
    expected: Any
    advice: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: the drafter has {self.found}, the target {self.expected}. {self.advice}"
        ).rstrip()


_ANOTHER_TARGET = "The drafter was made for another target: use the target it names."
_COPY = "A fine-tune or a copy of the same model may still fit: watch the acceptance."
_CHANGED = "The target's weights may have changed since training: watch the acceptance."
_STATED = (
    ("tokenizer", "tokenizer_sha256",
     "Ids may mean other text than in training: expect few accepted drafts."),
    ("chat template", "chat_template_sha256",
     "Prompts will look unlike those in training: expect fewer accepted drafts."),
    ("thinking mode", "thinking",
     "Switch the target to the drafter's mode, or expect fewer accepted drafts."),
)  # fmt: skip
"""What drafter and target state by the same field: its name, the field, what a mismatch means."""
_STRUCTURAL = ("hidden size", "vocabulary", "target layers", "captured hidden states")


def check_fit(config: AnyConfig, provenance: Provenance, facts: TargetFacts) -> list[Check]:
    """Compare everything that can be compared, structure first."""
    layers, words = facts.num_layers, f"ids 0 to {facts.vocab_size - 1}"
    captured = list(config.target_layer_ids)
    inside = all(layer < layers for layer in captured)
    checks = [
        _compare("hidden size", config.hidden_size, facts.hidden_size, _ANOTHER_TARGET),
        _compare("vocabulary", config.vocab_size, facts.vocab_size, _ANOTHER_TARGET),
        _compare("target layers", config.num_target_layers, layers, _ANOTHER_TARGET),
        _check(
            "captured hidden states", captured, f"layers 0 to {layers - 1}", inside, _ANOTHER_TARGET
        ),
    ]
    if isinstance(config, DrafterConfig):
        mask = config.mask_token_id
        checks.append(_check("mask token", mask, words, mask < facts.vocab_size, _ANOTHER_TARGET))
    checks += [
        _compare(name, getattr(provenance, field), getattr(facts, field), advice)
        for name, field, advice in _STATED
    ]
    stated = (provenance.target_id, facts.name)
    revisions = (provenance.target_revision, facts.revision)
    return [
        *checks,
        _compare("target id", *stated, _COPY, comparable=_is_hub_id),
        _compare("target revision", *revisions, _CHANGED),
        _training_length(provenance.training_length, facts.context_length),
    ]


def require_fit(config: AnyConfig, provenance: Provenance, facts: TargetFacts) -> list[Check]:
    """Raise where the shapes cannot work together; return the other mismatches as warnings."""
    mismatches = [c for c in check_fit(config, provenance, facts) if c.verdict == "mismatch"]
    structural = [check for check in mismatches if check.name in _STRUCTURAL]
    if structural:
        stated = "; ".join(f"{c.name} {c.found}, expected {c.expected}" for c in structural)
        made_for = (
            f" It says it was made for {provenance.target_id}." if provenance.target_id else ""
        )
        raise MismatchError(
            f"the drafter does not fit {facts.name}: {stated}.{made_for} {_ANOTHER_TARGET}"
        )
    return mismatches


def _check(name: str, found: Any, expected: Any, fits: bool, advice: str) -> Check:
    return Check(
        name=name,
        verdict="ok" if fits else "mismatch",
        found=found,
        expected=expected,
        advice="" if fits else advice,
    )


def _compare(
    name: str,
    found: Any,
    expected: Any,
    advice: str,
    *,
    comparable: Callable[[Any], bool] = lambda _: True,
) -> Check:
    if found == expected and found is not None:
        return _check(name, found, expected, True, advice)
    if found is not None and expected is not None and comparable(found) and comparable(expected):
        return _check(name, found, expected, False, advice)
    silent = "checkpoint" if found is None else "target"
    return Check(
        name=name,
        verdict="unknown",
        found=found,
        expected=expected,
        advice=f"The {silent} does not say.",
    )


def _is_hub_id(name: str) -> bool:
    """A local folder's name says nothing about which model lies in it."""
    return not Path(name).is_absolute() and name.count("/") == 1 and not Path(name).exists()


def _training_length(trained: int | None, context: int | None) -> Check:
    name = "training length"
    if trained is None or context is None:
        return _compare(name, trained, context, "")
    if trained > context:
        advice = "It saw longer sequences than this target takes: it was made for another one."
        return _check(name, trained, context, False, advice)
    advice = f"Past {trained} tokens expect fewer accepted drafts." if trained < context else ""
    return Check(name=name, verdict="ok", found=trained, expected=context, advice=advice)
