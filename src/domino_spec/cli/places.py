"""Targets, drafters and files that a command names, looked for before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from domino_spec.cli.voice import Voice


def require_places(
    voice: Voice,
    target: str,
    *,
    revision: str | None = None,
    drafts: Iterable[str | None] = (),
    draft_revision: str | None = None,
    prompts: Iterable[str] = (),
    data: Iterable[str] = (),
) -> None:
    """Refuse what is missing at once: importing what would load the rest takes seconds."""
    from domino_spec.data.files import PROMPT_FILES, find_places
    from domino_spec.targets.place import require_target

    require_target(target, revision=revision)
    for source in prompts:
        if Path(source).suffix:  # else the name of a built-in set, or a folder
            find_places(source, kinds=PROMPT_FILES)
    for source in data:
        find_places(source)
    for draft in drafts:
        if draft is not None:
            require_drafter(voice, draft, revision=draft_revision)


def require_drafter(voice: Voice, draft: str, *, revision: str | None = None) -> None:
    """Refuse a drafter that cannot be found; one on the hub is downloaded."""
    from domino_spec.checkpoints.locate import locate

    voice.status(f"finding drafter {draft}")
    locate(draft, revision=revision)


def checkpoints_among(drafts: Iterable[str | None]) -> list[str]:
    """Paths and hub ids; a drafter without a slash may be a method's name, such as lookup."""
    return [draft for draft in drafts if draft is not None and "/" in draft]
