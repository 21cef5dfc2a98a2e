"""Prompts as people write them, turned into token ids and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from domino_spec.errors import InputError
from domino_spec.targets import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor
"""Plain text, token ids, or chat messages (`{"role": ..., "content": ...}`)."""
_ENCODE = PreTrainedTokenizerFast._encode_plus
"""What Transformers' wrapper of a Rust tokenizer does, where a family has no way of its own."""


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether the caller gave just one."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Tensor):
        if prompts.dim() > 2:
            raise InputError(
                f"the prompt is a tensor of {prompts.dim()} dimensions; expected 1 or 2."
            )
        return ([prompts], True) if prompts.dim() <= 1 else (list(prompts), False)
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"a prompt is {type(prompts).__name__}; expected text, token ids or chat messages."
        )
    if len(prompts) and isinstance(prompts[0], (Integral, Mapping)):
        return [prompts], True  # type: ignore[list-item]
    return list(prompts), False  # type: ignore[arg-type]


def encode_prompt(
    prompt: Prompt, tokenizer: Any | None, chat_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of one prompt; messages go through the target's own chat template."""
    if isinstance(prompt, Tensor):
        if prompt.is_floating_point():
            raise InputError(f"the prompt is a tensor of {prompt.dtype}; expected whole token ids.")
        return [int(token) for token in prompt.flatten().tolist()]
    if isinstance(prompt, str):
        return encode_text(prompt, require_tokenizer(tokenizer))
    if not isinstance(prompt, Sequence):
        raise InputError(
            f"a prompt is {type(prompt).__name__}; expected text, token ids or chat messages."
        )
    if {*map(type, prompt)} == {int}:  # the common case, at a tenth of the next one's cost
        return list(prompt)  # type: ignore[arg-type]
    if all(isinstance(token, Integral) for token in prompt):
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    if all(isinstance(message, Mapping) for message in prompt):
        return _encode_chat(list(prompt), tokenizer, chat_options or {})  # type: ignore[arg-type]
    kinds = sorted({type(part).__name__ for part in prompt})
    raise InputError(
        f"a prompt is a list of {', '.join(kinds)}; expected token ids alone or messages alone."
    )


def _encode_chat(
    messages: list[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> list[int]:
    text = render_chat(messages, tokenizer, options)
    return encode_text(text, tokenizer, add_special_tokens=False)


def encode_text(text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text."""
    (ids,) = encode_texts([text], tokenizer, add_special_tokens=add_special_tokens)
    return ids


def encode_texts(
    texts: list[str], tokenizer: Any, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of each text; a Rust tokenizer encodes several at once, on all cores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (
        backend is None
        or getattr(type(tokenizer), "_encode_plus", None) is not _ENCODE
        or (backend.truncation, backend.padding) != (None, None)
        or backend.encode_special_tokens != tokenizer.split_special_tokens
    ):
        each = [tokenizer(text, add_special_tokens=add_special_tokens) for text in texts]
        return [[int(token) for token in found["input_ids"]] for found in each]
    # What the wrapper would do, in two thirds of its time: it also finds offsets and masks.
    found = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [list(each.ids) for each in found]


def render_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> str:
    """What the target's chat template makes of these messages, up to where the answer begins."""
    if not (
        getattr(require_tokenizer(tokenizer), "chat_template", None) or "chat_template" in options
    ):
        raise InputError(
            "the prompt is a chat but the target's tokenizer has no chat template; give plain text "
            "or set tokenizer.chat_template."
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
        )
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the target's chat template does not take these messages: {error}. Check their roles "
            "and contents."
        ) from error
    return str(text)


def check_system(system: str | None, tokenizer: Any) -> None:
    """Refuse a system message that would not be said; rows that bring their own go without."""
    if system is not None and not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "a system message needs a chat template, but the target's tokenizer has none; drop "
            "--system."
        )


def require_tokenizer(tokenizer: Any | None) -> Any:
    """The tokenizer, or an error that says what to do without one."""
    if tokenizer is None:
        raise InputError(
            "the prompt is text but the target came without a tokenizer; pass tokenizer=... or "
            "give token ids."
        )
    return tokenizer


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the target cannot read."""
    if not tokens:
        raise InputError("the prompt is empty; expected at least one token.")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InputError(
            f"the prompt holds the token id {outside}, outside the vocabulary of {vocab_size}; was "
            "it made with another model's tokenizer?"
        )


def check_prompt(tokens: Sequence[int], max_new_tokens: int, target: Target) -> None:
    """Refuse what the target cannot read or could not finish."""
    check_ids(tokens, target.vocab_size)
    context = target.context_length
    if context is not None and len(tokens) + max_new_tokens > context:
        room = context - len(tokens)
        todo = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        what = f"the target's context of {context}"
        if target.static_rope_limit == context:
            what += (
                " (past that its RoPE frequencies depend on the length of a forward, so that a "
                "verified block would not equal one-token steps)"
            )
        raise InputError(
            f"the prompt has {len(tokens)} tokens and max_new_tokens is {max_new_tokens}, together "
            f"more than {what}; {todo}."
        )


def end_tokens(target: Target, tokenizer: Any | None) -> set[int]:
    """What ends a sequence: the generation config's ids, else the tokenizer's."""
    config = getattr(target.model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    if ids is None:
        return set()
    return {int(ids)} if isinstance(ids, int) else {int(token) for token in ids}
