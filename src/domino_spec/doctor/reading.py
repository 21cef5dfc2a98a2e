"""What files alone tell: fit, tokenizer, chat template, mask token, context."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from domino_spec.baselines import BaselineConfig
from domino_spec.checkpoints import Check, Provenance, TargetFacts, check_fit
from domino_spec.doctor.findings import Finding, Plans, State
from domino_spec.drafter import DrafterConfig

_SERIOUS = ("hidden size", "vocabulary", "target layers", "taps", "mask token", "tokenizer")
_ELSEWHERE = ("training length",)
"""Checks that are told with what the user plans."""
_MARKER = re.compile(r"<\|[^|<>{}\s]+\|>")


def read_fit(
    config: DrafterConfig | BaselineConfig, provenance: Provenance, facts: TargetFacts
) -> Iterator[Finding]:
    """Every comparison of checkpoint and target, as `domino info` makes it."""
    for check in check_fit(config, provenance, facts):
        if check.name not in _ELSEWHERE:
            yield _from_check(check)


def _from_check(check: Check) -> Finding:
    state: State = "ok" if check.verdict == "ok" else "unknown"
    if check.verdict == "mismatch":
        state = "problem" if check.name in _SERIOUS else "warning"
    advice = check.advice
    if check.name == "tokenizer" and state == "problem":
        advice += " Use the tokenizer of the drafter's training, or train a drafter for this one."
    return Finding(
        name=check.name, state=state, found=check.found, expected=check.expected, advice=advice
    )


def read_tokenizer(tokenizer: Any | None, facts: TargetFacts) -> Iterator[Finding]:
    """Whether tokenizer, template and model belong to each other."""
    if tokenizer is None:
        yield Finding(
            name="tokenizer files", state="warning", found="none", expected="beside the weights",
            advice="Text cannot be read; save the model's tokenizer beside its weights.",
        )  # fmt: skip
        return
    highest = max(tokenizer.get_vocab().values(), default=-1)
    fits = highest < facts.vocab_size
    yield Finding(
        name="tokenizer ids",
        state="ok" if fits else "problem",
        found=f"up to {highest}",
        expected=f"below {facts.vocab_size}",
        advice=""
        if fits
        else "The tokenizer is of another version than the weights: get both anew.",
    )
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        yield Finding(
            name="chat markers", state="ok", found="no chat template: text is continued as it is"
        )
        return
    markers = sorted(set(_MARKER.findall(template if isinstance(template, str) else str(template))))
    split = [m for m in markers if len(tokenizer.encode(m, add_special_tokens=False)) != 1]
    yield Finding(
        name="chat markers",
        state="problem" if split else "ok",
        found=f"{', '.join(split)} in pieces" if split else f"{len(markers)}, a token each",
        expected="a token each",
        advice="The tokenizer is older than its chat template: get both of one version."
        if split
        else "",
    )


def read_mask(config: DrafterConfig, tokenizer: Any | None) -> Iterator[Finding]:
    """Whether the mask token is one that never stands in a text."""
    mask = config.mask_token_id
    if tokenizer is None:
        return
    text = {index: token for token, index in tokenizer.get_vocab().items()}.get(mask)
    own = getattr(tokenizer, "mask_token_id", None)
    special = text is None or mask in _special(tokenizer)
    expected = "a special or unused id" if own is None else f"the tokenizer's {own}"
    good = special if own is None else own == mask
    yield Finding(
        name="mask token text",
        state="ok" if good else "warning",
        found=f"{mask} ({'not in the tokenizer' if text is None else repr(text)})",
        expected=expected,
        advice=""
        if good
        else "It may not be the token of the drafter's training: compare with its training code.",
    )


def mask_candidates(config: DrafterConfig, tokenizer: Any | None, *, most: int) -> list[int]:
    """Ids that a drafter might have been trained with instead, likeliest first."""
    if tokenizer is None:
        return []
    used = set(tokenizer.get_vocab().values())
    free = (index for index in range(config.vocab_size) if index not in used)
    own = getattr(tokenizer, "mask_token_id", None)
    first_free = [index for index, _ in zip(free, range(2), strict=False)]
    found = dict.fromkeys([*([] if own is None else [own]), *first_free, *_special(tokenizer)])
    usable = [i for i in found if 0 <= i < config.vocab_size and i != config.mask_token_id]
    return usable[:most]


def _special(tokenizer: Any) -> list[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = [index for index, token in added.items() if getattr(token, "special", False)]
    return sorted({*marked, *getattr(tokenizer, "all_special_ids", [])})


def read_context(
    config: DrafterConfig | BaselineConfig | None,
    provenance: Provenance,
    facts: TargetFacts,
    plans: Plans,
) -> Iterator[Finding]:
    """The length that is planned against target, drafter and training."""
    wanted, trained = plans.context, provenance.training_length
    limits = {"the target's context": facts.context_length}
    limits["the drafter's positions"] = getattr(config, "max_position_embeddings", None)
    known = {name: limit for name, limit in limits.items() if limit is not None}
    told = ", ".join(f"{name} {limit}" for name, limit in known.items())
    if config is not None:
        told += f", trained on {'unknown' if trained is None else trained}"
    found = "as long as the target takes" if wanted is None else wanted
    over = [name for name, limit in known.items() if wanted is not None and wanted > limit]
    state: State = "ok"
    advice = "" if trained is None else f"Past {trained} tokens expect fewer accepted drafts."
    if trained is not None and facts.context_length is not None and trained > facts.context_length:
        state, advice = "warning", "It saw longer sequences than this target takes: another target?"
    elif over:
        state = "problem"
        advice = f"Plan for at most {min(known.values())} tokens: {' and '.join(over)} end there."
    elif trained is None and config is not None:
        state, advice = "unknown", "The checkpoint does not say how long its training texts were."
    elif trained is not None and wanted is not None and wanted > trained:
        state = "warning"
        advice += " Train on longer texts, or decode plainly behind that."
    elif wanted is not None:
        advice = ""
    yield Finding(name="context", state=state, found=found, expected=told, advice=advice)
