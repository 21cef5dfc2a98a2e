"""Entry point of `model.generate(..., custom_generate=domino_spec.RECIPE, draft=...)`."""

from __future__ import annotations

from typing import Any

from domino_spec.api.custom_generate import generate_with_recipe


def generate(model: Any, draft: Any = None, **arguments: Any) -> Any:
    """Called by Transformers with everything that was given to `generate`."""
    return generate_with_recipe(model, draft, **arguments)
