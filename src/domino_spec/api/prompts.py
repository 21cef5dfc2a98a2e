"""Prompts as people write them, turned into token ids and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from domino_spec.errors import InputError
from domino_spec.targets import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor
"""Plain text, token ids, or chat messages (`{"role": ..., "content": ...}`)."""


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether the caller gave just one."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Tensor):
        return ([prompts], True) if prompts.dim() <= 1 else (list(prompts), False)
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"a prompt is {type(prompts).__name__}; expected text, token ids or chat messages."
        )
    if len(prompts) and isinstance(prompts[0], (int, Mapping)):
        return [prompts], True  # type: ignore[list-item]
    return list(prompts), False  # type: ignore[arg-type]


def encode_prompt(
    prompt: Prompt, tokenizer: Any | None, chat_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of one prompt; messages go through the target's own chat template."""
    if isinstance(prompt, Tensor):
        return [int(token) for token in prompt.flatten().tolist()]
    if not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int)):
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    if tokenizer is None:
        raise InputError(
            "the prompt is text but the target came without a tokenizer; pass tokenizer=... or "
            "give token ids."
        )
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the prompt is a chat but the target's tokenizer has no chat template; give plain text "
            "or set tokenizer.chat_template."
        )
    text = tokenizer.apply_chat_template(
        list(prompt), tokenize=False, add_generation_prompt=True, **(chat_options or {})
    )
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def check_prompt(tokens: Sequence[int], max_new_tokens: int, target: Target) -> None:
    """Refuse what the target cannot read or could not finish."""
    if not tokens:
        raise InputError("the prompt is empty; expected at least one token.")
    outside = [token for token in tokens if not 0 <= token < target.vocab_size]
    if outside:
        raise InputError(
            f"the prompt holds the token id {outside[0]}, outside the vocabulary of "
            f"{target.vocab_size}; was it made with another model's tokenizer?"
        )
    context = target.context_length
    if context is not None and len(tokens) + max_new_tokens > context:
        room = context - len(tokens)
        todo = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise InputError(
            f"the prompt has {len(tokens)} tokens and max_new_tokens is {max_new_tokens}, together "
            f"more than the target's context of {context}; {todo}."
        )
