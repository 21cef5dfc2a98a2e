"""Inference models: a file a family, named by its Transformers `model_type`.

A new family is one new module here with one subclass of `InferenceModel`; it is found by its name.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from domino_spec.engine.models.base import InferenceModel
from domino_spec.errors import TargetError
from domino_spec.targets import Target


def families() -> list[str]:
    """The `model_type`s that the engine runs."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def unsupported_reason(target: Target) -> str | None:
    """What keeps a target off the engine, in words; None if nothing does."""
    family = _family(target)
    if family is None:
        return f"it is a {type(target.model).__name__}; the engine runs {', '.join(families())}"
    return family.unsupported_reason(target)


def load_model(target: Target, *, slots: int, capacity: int, pack: bool = False) -> InferenceModel:
    """A target's inference model over its own weights, with slots of this size."""
    reason = unsupported_reason(target)
    if reason is not None:
        raise TargetError(f"{target.name} cannot run on the engine: {reason}.")
    family = _family(target)
    assert family is not None
    return family(target, slots=slots, capacity=capacity, pack=pack)


def _family(target: Target) -> type[InferenceModel] | None:
    """The inference model of this very class of Transformers; None where there is none."""
    if target.config.model_type not in families():
        return None
    module = import_module(f"{__name__}.{target.config.model_type}")
    found: type[InferenceModel] = next(
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, InferenceModel)
        and each.__module__ == module.__name__
    )
    known = (found.reference_class, found.multimodal_class)
    return found if type(target.model) in known else None
