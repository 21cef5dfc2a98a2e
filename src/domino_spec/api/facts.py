"""What a drafter must agree with, read off a loaded target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_spec.checkpoints import (
    TargetFacts,
    chat_template_fingerprint,
    tokenizer_fingerprint,
)
from domino_spec.targets import Target


def target_facts(
    target: Target,
    tokenizer: Any | None,
    revision: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> TargetFacts:
    """Describe a target for the check against a drafter."""
    thinking = (chat_options or {}).get("enable_thinking")
    return TargetFacts(
        name=target.name,
        revision=revision,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        context_length=target.context_length,
        tokenizer_sha256=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        chat_template_sha256=None if tokenizer is None else chat_template_fingerprint(tokenizer),
        thinking=None if thinking is None else ("on" if thinking else "off"),
    )
