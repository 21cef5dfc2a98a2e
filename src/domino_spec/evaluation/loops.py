"""Whether the engine runs a source of drafts, whatever its kind."""

from __future__ import annotations

from domino_spec.baselines import PLAIN
from domino_spec.engine.families import unsupported_reason
from domino_spec.engine.sources import AnySource, as_maker
from domino_spec.targets import Target


def unsupported_by_engine(
    target: Target, *, name: str, kind: str, source: AnySource | None
) -> str | None:
    """What keeps it off the engine, in words; None if nothing does."""
    reason = unsupported_reason(target)
    if reason is not None:
        return f"as for the target, {reason}"
    if source is not None:
        reason = as_maker(source).why_not(target.device)
        return None if reason is None else f"as for {name}, {reason}"
    return None if kind == PLAIN else f"the engine does not run {name} ({kind})"
