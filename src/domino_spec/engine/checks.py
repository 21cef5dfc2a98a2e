"""What an engine refuses, in words, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import torch

from domino_spec.decoding import Drafter, Sequence
from domino_spec.engine.sampling import unsupported_reason
from domino_spec.errors import InputError, MismatchError


def check_settings(
    drafter: Drafter | None,
    device: torch.device,
    *,
    slots: int | None,
    capacity: int | None,
    depth: int | None,
    graphs: bool | None,
    chunk: int | None,
) -> None:
    """Refuse an engine that could not run as it is asked to."""
    for name, value in (("slots", slots), ("capacity", capacity), ("chunk", chunk)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; expected 1 or more.")
    if graphs and device.type != "cuda":
        raise InputError(f"graphs are CUDA's and the target is on {device}; leave graphs out.")
    if drafter is None or not drafter.drafts:
        if depth:
            raise InputError(f"depth is {depth} without a drafter; leave it out, or give one.")
        return
    if (reason := drafter.unsupported_reason(device)) is not None:
        raise MismatchError(f"{reason}. Use the reference loop.")


def check_sequence(sequence: Sequence, *, vocab_size: int) -> None:
    """Refuse a sequence that has begun elsewhere, or that needs the reference loop."""
    reason = unsupported_reason(sequence.params)
    if sequence.sampler is not None:
        reason = "it chooses its tokens by a sampler of the reference loop"
    if reason is not None:
        raise InputError(
            f"the sequence cannot run on the engine: {reason}. Decode it with the reference loop."
        )
    if sequence.output or sequence.finished:
        raise InputError(
            f"the sequence has {len(sequence.output)} tokens already; the engine begins with a "
            "prompt. Make a new sequence whose prompt holds them."
        )
    if not sequence.prompt:
        raise InputError("the prompt is empty; expected at least one token.")
    check_tokens(sequence.prompt, vocab_size)


def check_tokens(tokens: Tokens[int], vocab_size: int) -> None:
    """Refuse ids that the target does not know: a kernel would read past the embedding's end."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InputError(
            f"the prompt holds ids from {min(tokens)} to {max(tokens)}; the target knows 0 to "
            f"{vocab_size - 1}. Was it made with another tokenizer?"
        )
