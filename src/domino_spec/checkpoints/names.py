"""Tensor names: as files spell them, as the public layout does, as the drafter does."""

from __future__ import annotations

from collections.abc import Iterable

OFFSETS = "d2t"
"""Map of a reduced vocabulary: target id minus draft id, for each draft id."""

MEMBERS = "t2d"
"""Which target ids a reduced vocabulary holds; the map says it too."""
LM_HEAD = "lm_head.weight"
"""A copy of the target's rows; engines want it with a reduced vocabulary."""

TARGET_COPIES = frozenset(
    {"embed_tokens.weight", LM_HEAD, "verifier_lm_head.weight", "verifier_norm.weight", MEMBERS}
)
"""What the speculators layout repeats from the target; a drafter uses the target's own."""

_HEAD = "head."
_BACKBONE = "backbone."
_HEAD_MODULES = {
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "markov_w1.": "Markov",
    "markov_w2.": "Markov",
}
SPECULATORS_HEAD = "logits_correction."
_HEAD_CONTAINERS = ("logit_head.", SPECULATORS_HEAD)
_MODEL = "model."


def public_names(stored: Iterable[str]) -> dict[str, str]:
    """Public name of each stored one: a `model.` prefix and a head's container are dropped."""
    names = list(stored)
    prefixed = f"{_MODEL}fc.weight" in names
    return {name: _public_name(name, prefixed) for name in names}


def _public_name(name: str, prefixed: bool) -> str:
    public = name.removeprefix(_MODEL) if prefixed else name
    for container in _HEAD_CONTAINERS:
        public = public.removeprefix(container)
    return public


def is_head(public: str) -> bool:
    """Whether a public name belongs to a head."""
    return head_kind(public) is not None


def head_kind(public: str) -> str | None:
    """The kind of head that a public name belongs to."""
    kinds = [kind for module, kind in _HEAD_MODULES.items() if public.startswith(module)]
    return kinds[0] if kinds else None


def to_state(public: str) -> str:
    """The drafter's own name of a public tensor."""
    return (_HEAD if is_head(public) else _BACKBONE) + public


def to_public(state: str) -> str:
    """The public name of one of the drafter's tensors."""
    return state.removeprefix(_HEAD).removeprefix(_BACKBONE)
