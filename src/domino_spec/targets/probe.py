"""Small forwards at load time that prove what configurations only claim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.errors import DominoError, TargetError
from domino_spec.targets.support import own_window
from domino_spec.targets.target import Target, first_tensor

_PREFIX, _SHORT, _BLOCK = 4, 2, 3
_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)


def probe_target(target: Target) -> None:
    """Refuse a target whose states cannot be captured or rolled back; learn how it scales its ends.

    A model that ignores positions, hides state outside its cache or changes its logits in an
    unknown way would decode wrongly without an error. A few forwards of a few tokens tell.
    """
    tokens = torch.arange(3, 3 + 7 * (_PREFIX + _BLOCK), 7, device=target.device)
    tokens = (tokens % target.vocab_size).unsqueeze(0)
    prefix, block = tokens[:, :_PREFIX], tokens[:, _PREFIX:]
    with torch.no_grad():
        _learn_ends(target, tokens)
        _check_captured_states(target, tokens)
        _check_rollback(target, prefix, block)
        target.batch_refusal = _batch_refusal(target, prefix, block)


def _learn_ends(target: Target, tokens: Tensor) -> None:
    seen: dict[str, Tensor] = {}

    def keep_output(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            seen[name] = first_tensor(output)

        return hook

    def keep_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["first layer"] = args[0] if args else kwargs["hidden_states"]

    handles = [
        target.embedding.register_forward_hook(keep_output("embedding")),
        target.lm_head.register_forward_hook(keep_output("lm_head")),
        target.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True),
    ]
    try:
        logits = target.forward(tokens, target.new_cache(1)).logits
    except torch.OutOfMemoryError:
        raise
    except _FORWARD_ERRORS as error:
        raise TargetError(
            f"{target.name} ({type(target.model).__name__}) cannot run on token ids, positions and "
            f"a plain cache alone: {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()

    embedded, entered = seen["embedding"], seen["first layer"]
    if embedded.shape[-1] != target.hidden_size:
        raise TargetError(
            f"{target.name} embeds tokens in {embedded.shape[-1]} dimensions but its layers have "
            f"{target.hidden_size}; the drafter needs one width for both."
        )
    scale = _ratio(entered.to(embedded.device), embedded)
    # Not a multiple (learned positions, say): the drafter gets the embedding's own output.
    target.embedding_scale = 1.0 if scale is None else scale

    target.vocab_size = logits.shape[-1]
    raw = seen["lm_head"].to(logits.device)
    target.logit_softcap = getattr(target.config, "final_logit_softcapping", None)
    scale = 1.0 if target.logit_softcap is not None else _ratio(logits, raw)
    if scale is not None:
        target.logit_scale = scale
    if not _same(target.finish_logits(raw), logits):
        raise TargetError(
            f"{target.name} ({type(target.model).__name__}) changes the logits after its lm_head "
            "in a way that is neither a scale nor a soft-cap; the drafter cannot borrow them."
        )


def _check_captured_states(target: Target, tokens: Tensor) -> None:
    last = target.num_layers - 1
    captured = target.forward(
        tokens, target.new_cache(1), capture_layers=sorted({0, last})
    ).captured
    width = target.hidden_size * len({0, last})
    expected = (1, tokens.shape[1], width)
    if captured is None or tuple(captured.shape) != expected:
        found = None if captured is None else tuple(captured.shape)
        raise TargetError(
            f"the layers of {target.name} return states of shape {found}; expected {expected}. "
            "Hidden states of such layers cannot be captured."
        )


def _check_rollback(target: Target, prefix: Tensor, block: Tensor) -> None:
    clean = target.new_cache(1)
    target.forward(prefix, clean)
    clean.commit([_PREFIX])
    expected = target.forward(block, clean).logits

    whole = target.forward(torch.cat((prefix, block), dim=1), target.new_cache(1)).logits
    if not _same(expected, whole[:, _PREFIX:]):
        raise TargetError(
            f"{target.name} ({type(target.model).__name__}) gives other logits with a KV cache "
            "than without one: it does not use the cache it is given."
        )

    rolled = target.new_cache(1)
    target.forward(prefix, rolled)
    rolled.commit([_PREFIX])
    accepted, rejected = block[:, :1], block[:, 1:].flip(1)
    target.forward(torch.cat((accepted, rejected), dim=1), rolled)
    rolled.commit([1])
    found = target.forward(block[:, 1:], rolled).logits
    if not _same(found, expected[:, 1:]):
        raise TargetError(
            f"{target.name} ({type(target.model).__name__}) gives other logits after a roll-back: "
            "it keeps state outside its cache, so a rejected draft could not be undone."
        )


def _batch_refusal(target: Target, prefix: Tensor, block: Tensor) -> str | None:
    """Why sequences of different lengths cannot share a forward; None if they can."""
    window = own_window(target.config)
    if window is not None:
        return (
            f"{target.name} ({type(target.model).__name__}) applies a window of its own "
            f"({window}) that sequences of different lengths would shift; decode one sequence at "
            "a time."
        )
    alone = target.new_cache(1)
    target.forward(prefix[:, :_SHORT], alone)
    alone.commit([_SHORT])
    expected = target.forward(block, alone).logits
    try:
        both = target.new_cache(2)
        target.forward(prefix.repeat(2, 1), both)
        both.commit([_PREFIX, _SHORT])
        found = target.forward(block.repeat(2, 1), both).logits[1:]
    except DominoError as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except _FORWARD_ERRORS as error:
        return (
            f"{target.name} ({type(target.model).__name__}) does not take positions and masks per "
            f"sequence ({type(error).__name__}: {error}); decode one sequence at a time."
        )
    if _same(found, expected):
        return None
    return (
        f"{target.name} ({type(target.model).__name__}) gives other logits when a shorter "
        "sequence shares a batch with a longer one; decode one sequence at a time."
    )


def _tolerance(states: Tensor) -> float:
    return 1e-3 if states.dtype in (torch.float32, torch.float64) else 5e-2


def _same(found: Tensor, expected: Tensor) -> bool:
    bound = _tolerance(expected) * float(expected.float().abs().max())
    return bool((found.float() - expected.float()).abs().max() <= bound)


def _ratio(found: Tensor, base: Tensor) -> float | None:
    """The factor c with found = c · base, or None if there is none."""
    if found.shape != base.shape:
        return None
    tolerance = _tolerance(base)
    found, base = found.double().flatten(), base.double().flatten()
    factor = float(found @ base / (base @ base))
    if not bool((found - factor * base).abs().max() <= tolerance * found.abs().max()):
        return None
    return 1.0 if abs(factor - 1.0) < tolerance else factor
