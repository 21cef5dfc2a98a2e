"""The target's lm_head rows of a drafter's reduced vocabulary, which some checkpoints store."""

from __future__ import annotations

from torch import Tensor

from domino_spec.checkpoints import Checkpoint, require_fit
from domino_spec.drafters.facts import target_facts
from domino_spec.targets import load_target


def lm_head_rows(
    checkpoint: Checkpoint,
    target: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Tensor:
    """The rows as the target's own files have them, [draft vocabulary, hidden]."""
    loaded = load_target(
        target,
        revision=revision,
        dtype="auto",
        device="cpu",
        trust_remote_code=trust_remote_code,
    )
    facts = target_facts(loaded.target, loaded.tokenizer, loaded.revision)
    require_fit(checkpoint.config, checkpoint.provenance, facts)
    tokens = checkpoint.drafter.draft_tokens
    assert tokens is not None
    return loaded.target.lm_head_rows(tokens)
