"""What a drafter must agree with, read off a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from domino_spec.checkpoints import (
    TargetFacts,
    chat_template_fingerprint,
    tokenizer_fingerprint,
)
from domino_spec.targets import Target, load_config, load_tokenizer, resolved_revision
from domino_spec.targets.gguf_metadata import gguf_shape
from domino_spec.targets.place import is_gguf, require_target
from domino_spec.targets.support import check_config


def target_facts(
    target: Target,
    tokenizer: Any | None,
    revision: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> TargetFacts:
    """Describe a loaded target."""
    return _facts(
        target.config,
        tokenizer,
        name=target.name,
        revision=revision,
        vocab_size=target.vocab_size,
        thinking=(chat_options or {}).get("enable_thinking"),
    )


def read_target_facts(
    source: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    thinking: bool | None = None,
    shape_alone: bool = False,
    weights: bool = True,
) -> TargetFacts:
    """Describe a target from its config and tokenizer, without loading its weights.

    `shape_alone` leaves the tokenizer, and reads of a GGUF file no more than its metadata: its
    configuration comes with the conversion of its weights, unless these are not wanted.
    """
    if shape_alone and is_gguf(source):
        require_target(source)
        shape: dict[str, Any] = {**gguf_shape(Path(source))}
        return TargetFacts(name=str(source), **shape)
    origin: dict[str, Any] = {
        "revision": revision, "base": base, "trust_remote_code": trust_remote_code,
        "weights": weights,
    }  # fmt: skip
    config = load_config(source, **origin)
    check_config(config, str(source))
    text = config.get_text_config()
    found = _facts(
        text,
        None if shape_alone else load_tokenizer(source, **origin),
        name=str(source),
        revision=None if shape_alone else resolved_revision(source, revision),
        vocab_size=int(text.vocab_size),
        thinking=thinking,
    )
    return replace(found, architectures=tuple(config.architectures or ()))


def _facts(
    config: Any,
    tokenizer: Any | None,
    *,
    name: str,
    revision: str | None,
    vocab_size: int,
    thinking: bool | None,
) -> TargetFacts:
    return TargetFacts(
        name=name,
        revision=revision,
        hidden_size=int(config.hidden_size),
        vocab_size=vocab_size,
        num_layers=int(config.num_hidden_layers),
        context_length=getattr(config, "max_position_embeddings", None),
        tokenizer_sha256=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        chat_template_sha256=None if tokenizer is None else chat_template_fingerprint(tokenizer),
        thinking=None if thinking is None else ("on" if thinking else "off"),
    )
