"""From a request to what will be run: every question answered before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from domino_spec.errors import InputError
from domino_spec.serving.backends import Backend
from domino_spec.serving.backends.drafts import ServedDraft, plan_draft
from domino_spec.serving.backends.installed import Installed, check_version, find_engine
from domino_spec.serving.backends.launch import Launch
from domino_spec.serving.backends.request import ServeRequest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A launch, the drafter's folder that it names, and what to say before."""

    launch: Launch
    draft: ServedDraft | None
    depth: int | None
    warnings: tuple[str, ...]


def plan(
    request: ServeRequest, backend: Backend, *, environment: Mapping[str, str], dry: bool = False
) -> Plan:
    """What would be run; `dry` does without the engine and shows its newest command line."""
    backend.refuse(request)
    warnings = backend.cautions(request)
    try:
        found = find_engine(backend.ENGINE, request.engine_python)
    except InputError as error:
        if not dry or request.engine_python is not None:
            raise
        found = _imagined(backend)
        warnings.append(f"shown as for {backend.ENGINE.title} {found.version}: {error}")
    draft = None
    if request.drafter is not None:
        warnings += check_version(backend.ENGINE, found)
        draft = plan_draft(request, backend.NEEDS)
        warnings += draft.warnings
    return Plan(
        launch=backend.command(request, found, draft, environment),
        draft=draft,
        depth=None if draft is None else backend.depth(request, draft),
        warnings=tuple(warnings),
    )


def _imagined(backend: Backend) -> Installed:
    return Installed(
        python="python",
        command=backend.ENGINE.command,
        distribution=backend.ENGINE.distributions[0],
        version=backend.NEWEST,
        has_plugin=True,
    )
