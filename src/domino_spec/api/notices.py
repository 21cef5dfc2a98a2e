"""What a caller should hear about without being stopped."""

from __future__ import annotations

import warnings

from domino_spec.decoding import RunStats
from domino_spec.drafter import Drafter
from domino_spec.targets import Target


class UselessDrafterWarning(UserWarning):
    """The drafter is hardly ever right: probably misconfigured."""


class MismatchWarning(UserWarning):
    """The drafter was made for something slightly different."""


def warn_useless(stats: RunStats, drafter: Drafter | None, target: Target) -> None:
    """Name the usual reasons for a drafter that is hardly ever right."""
    alignment = "plain" if drafter is None else drafter.config.alignment
    warnings.warn(
        f"only {stats.tokens_per_cycle:.2f} tokens a cycle after {stats.rows.cycles} cycles: "
        f"the drafter is hardly ever right. Check its alignment (it is read as {alignment!r}), "
        f"that it was trained for this target ({target.name}), and that the prompt uses the chat "
        "template of its training.",
        UselessDrafterWarning,
        stacklevel=4,
    )
