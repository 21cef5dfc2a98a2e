"""Logits hooks: rules for the next token's logits, given the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor

from domino_spec.errors import InputError


class LogitsHook(Protocol):
    """Changes the target's logits for the token after `prompt` and `output`: a mask, a bias.

    A pure function of these tokens: with the same ones it gives the same logits, whatever it was
    asked before. Then one hook serves any number of sequences, and no draft can disturb it. It may
    write into the logits it is given, and must leave the tokens alone.
    """

    def __call__(
        self,
        prompt: Tokens[int],
        output: Tokens[int],
        logits: Tensor,  # [vocabulary] float32, on the target's device
        /,
    ) -> Tensor:
        """The logits to choose from, [vocabulary]; -inf bans a token."""
        ...


def apply_hook(
    hook: LogitsHook, prompt: Tokens[int], output: Tokens[int], logits: Tensor
) -> Tensor:
    """What a hook gives; an error that names hook and position where it fails."""
    name = getattr(hook, "__name__", type(hook).__name__)
    where = f"the logits hook {name} at position {len(prompt) + len(output)}"
    try:
        found = hook(prompt, output, logits)
    except Exception as error:
        raise InputError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or found.shape != logits.shape:
        given = list(found.shape) if isinstance(found, Tensor) else repr(found)
        raise InputError(f"{where} gave {given}; expected logits {list(logits.shape)}.")
    return found


def no_token_left(position: int) -> InputError:
    """Where processors and hooks ban every token: `position` counts prompt and output."""
    return InputError(
        f"no token is left at position {position}: the logits processors and hooks ban all of "
        "them. Leave one at least, such as the end token."
    )


class HookProcessor(LogitsProcessor):  # type: ignore[misc]
    """A hook as a Transformers processor, for the reference loop."""

    def __init__(self, hook: LogitsHook, prompt_length: int) -> None:
        self._hook, self._prompt_length = hook, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [batch, vocabulary] after `input_ids` [batch, length]."""
        found = []
        for ids, own in zip(input_ids.tolist(), scores, strict=True):
            prompt, output = ids[: self._prompt_length], ids[self._prompt_length :]
            found.append(apply_hook(self._hook, prompt, output, own))
        return torch.stack(found)
