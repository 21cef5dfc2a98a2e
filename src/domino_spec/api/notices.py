"""What a caller should hear about without being stopped."""

from __future__ import annotations

import sys
import warnings

from domino_spec.decoding import AcceptanceStats, Drafter, RunStats
from domino_spec.drafter import DrafterConfig
from domino_spec.engine.policy import DepthPolicy, Disabled
from domino_spec.errors import Notice
from domino_spec.targets import Target

_LOOK_EVERY = 8
"""Cycles between two looks at the counts."""


class UselessDrafterWarning(UserWarning):
    """The drafter is hardly ever right: probably misconfigured."""


class ReferenceLoopNotice(Notice):
    """The engine cannot run a request; the reference loop does, more slowly."""


class NoGainNotice(Notice):
    """Drafts cost more time here than they save; decoding goes on without them."""


class DtypeNotice(Notice):
    """The type that is fastest here is not the checkpoint's own."""


def tell_reference(reason: str) -> None:
    """Say why a request does not run on the engine."""
    _tell(
        f"the engine cannot run this, so the slower reference loop does: {reason}.",
        ReferenceLoopNotice,
    )


class DraftWatch:
    """Says once a run that the drafter is hardly ever right, and once that it does not pay."""

    def __init__(self, drafter: Drafter | None, target: Target) -> None:
        self._drafter = None if drafter is None or drafter.model is None else drafter
        self._target = target
        self._before = AcceptanceStats()
        self._warned: RunStats | None = None
        self._told = False

    def look(self, stats: RunStats, policy: DepthPolicy | None) -> None:
        """Judge by a run so far; where a policy drafts seldom, by all runs before it too."""
        if stats.acceptance.cycles % _LOOK_EVERY:
            return
        total = AcceptanceStats()
        total.add(stats.acceptance)
        if policy is not None:
            total.add(self._before)
        if self._drafter is not None and total.useless and self._warned is not stats:
            self._warned = stats
            _warn_useless(total, self._drafter, self._target)
        disabled = None if policy is None else policy.disabled
        if disabled is not None and not self._told:
            self._told = True
            _tell_no_gain(disabled)

    def end(self, stats: RunStats) -> None:
        """A run is over: its counts go with those before it."""
        self._before.add(stats.acceptance)


def _warn_useless(total: AcceptanceStats, drafter: Drafter, target: Target) -> None:
    """Name the usual reasons for a drafter that is hardly ever right."""
    alignment = ""
    if isinstance(drafter.config, DrafterConfig):
        alignment = f"its alignment (it is read as {drafter.config.alignment!r}), "
    _tell(
        f"only {total.tokens_per_drafted_cycle:.2f} tokens a cycle after {total.drafted} cycles "
        f"with drafts: the drafter is hardly ever right. Check {alignment}that it was trained for "
        f"this target ({target.name}), and that the prompt uses the chat template of its training.",
        UselessDrafterWarning,
    )


def _tell_no_gain(found: Disabled) -> None:
    batch = "one sequence" if found.batch_size == 1 else f"{found.batch_size} sequences"
    batch += f" ({', '.join(found.kinds)})" if found.kinds else ""
    drafts = "1 draft" if found.depth == 1 else f"{found.depth} drafts"
    _tell(
        f"drafts do not pay here: with {batch} a plain step takes {found.plain * 1e3:.1f} ms and a "
        f"cycle of {drafts} {found.cycle * 1e3:.1f} ms, so it would have to commit "
        f"{found.cycle / found.plain:.2f} tokens, and {found.tokens:.2f} are likely. Decoding "
        "plainly, and looking again now and then; depth=... sets a fixed number of drafts.",
        NoGainNotice,
    )


def _tell(message: str, category: type[Warning]) -> None:
    """Warn at the line that called this package, however deep in generators it is noticed."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.split(".")[0] in (__name__.split(".")[0], "torch")
