"""The SGLang plugin: lets an unmodified SGLang load drafters named `DominoDraftModel`.

SGLang serves Domino heads by itself, but knows only the name `DFlashDraftModel`; a folder written
by `domino export --to sglang` carries that name and needs no plugin. Drafts are greedy: SGLang
rolls the head out and verifies the drafts as certain choices inside its worker, and no hook short
of replacing that code lets a plugin sample them. Outputs are still exact.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from domino_spec.plugins.sglang.versions import SUPPORTED, is_too_old, problem

__all__ = ["MODELS", "SUPPORTED", "VARIABLE", "register"]

MODELS = "domino_spec.plugins.sglang.models"
"""A package of models in the form that SGLang's registry takes."""
VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""Names one package of models that SGLang adds to its own; child processes inherit it."""

_REGISTRY = "sglang.srt.models.registry"
_log = logging.getLogger(__name__)


def register() -> None:
    """Add the name; SGLang calls this in every process (entry point group sglang.srt.plugins).

    The registry imports every model there is, so it is left to SGLang to do that when it comes
    to it, and only told what to add.
    """
    found = version("sglang")
    wrong = problem(found)
    if wrong is not None:
        _log.warning("%s", wrong)
    if is_too_old(found):
        return
    if _REGISTRY in sys.modules:
        sys.modules[_REGISTRY].ModelRegistry.register(MODELS, overwrite=True)
    elif os.environ.setdefault(VARIABLE, MODELS) != MODELS:
        _log.warning(
            "%s is %s, so the name DominoDraftModel could not be added; expected it unset. Write "
            "the drafter with `domino export --to sglang`, whose name SGLang knows.",
            VARIABLE,
            os.environ[VARIABLE],
        )
