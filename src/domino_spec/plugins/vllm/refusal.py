"""What stands for Domino drafters in a vLLM that the plugin does not know.

That vLLM may be laid out differently, and the packages installed with it may not be those that the
rest of this package needs. So nothing here relies on either: what does not carry a head of ours
must be served as if there were no plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import vllm
from torch import nn

from domino_spec.errors import CheckpointError
from domino_spec.plugins.vllm.versions import problem

HEADS = ("domino", "causal_v5", "markov")
"""Every `projector_type` of a head that vLLM would leave out, or fail to find a place for."""


class UnsupportedVersion(nn.Module):
    """Cannot be built: says which versions can serve the drafter."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002
        raise CheckpointError(problem(vllm.__version__) or "this vLLM is not supported.")


class Guard:
    """The registry's entry for a name that our drafters share with vLLM's: it refuses ours.

    Only the class is ours. All else is asked of vLLM's own entry: a class registered in its place
    would be inspected once and remembered by our file's contents, whatever vLLM comes next.
    """

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def load_model_cls(self) -> type:
        """vLLM's own class; what is built from it is vLLM's own too, or nothing."""
        own = self._entry.load_model_cls()

        class Guarded(own):  # type: ignore[misc, valid-type]
            def __new__(cls, *, vllm_config: Any, **more: Any) -> Any:
                if carries_head(vllm_config):
                    return UnsupportedVersion(vllm_config=vllm_config)
                return own(vllm_config=vllm_config, **more)

        return Guarded


def guard(registry: Any, architectures: Iterable[str]) -> None:
    """Stand before vLLM's own entries; what it lacks, or keeps in another way, is left to it."""
    entries = getattr(registry, "models", {})
    for name in architectures:
        if hasattr(entries.get(name), "load_model_cls"):
            entries[name] = Guard(entries[name])


def carries_head(vllm_config: Any) -> bool:
    """Whether the draft configuration states a head or a shift, both unknown to vLLM's classes."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    section = getattr(draft, "dflash_config", None)
    if not isinstance(section, Mapping):
        return False
    return section.get("projector_type") in HEADS or bool(section.get("shift_label"))
