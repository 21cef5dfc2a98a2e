"""Memory that a pair needs, counted from shapes, against what the machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from domino_spec.baselines import Eagle3Config
from domino_spec.baselines.describe import AnyDescription
from domino_spec.doctor.findings import Finding, Plans
from domino_spec.drafter import DrafterConfig

_UNPLANNED = 4096
_TIGHT = 0.9


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, part by part."""

    target: int
    drafter: int
    caches: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.drafter + self.caches + self.activations

    def __str__(self) -> str:
        parts = {name.replace("_", " "): size for name, size in vars(self).items()}
        inside = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
        return f"about {gigabytes(self.total)} ({inside})"


def needs(
    config: Any, described: AnyDescription, plans: Plans, *, dtype: torch.dtype, context: int
) -> Needs | None:
    """What decoding takes at a context; None for a target whose size cannot be counted."""
    weights = _parameters(config)
    if weights is None:
        return None
    text, size = config.get_text_config(), dtype.itemsize
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    tokens = plans.rows * context
    target_cache = 2 * int(text.num_hidden_layers) * kv_heads * head_dim * tokens
    # The draft context grows in doublings.
    draft_cache = 2 * 2 * _cached_width(described) * tokens
    block = plans.rows * (described.drafts + 1)
    logits = 2 * block * int(text.vocab_size)  # the drafter's and the target's, both of a block
    wide = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    prefill = tokens * (2 * wide + (4 + _taps(described)) * int(text.hidden_size))
    return Needs(
        target=weights * size,
        drafter=described.parameters * size,
        caches=(target_cache + draft_cache) * size,
        activations=logits * (size + 4) + prefill * size,
    )


def read_memory(
    config: Any,
    described: AnyDescription,
    plans: Plans,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Finding:
    """Whether it fits, and what to do if not."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or _UNPLANNED
    context = min(limit, _UNPLANNED) if plans.context is None else plans.context
    what = f"memory for {plans.rows} × {context} tokens, {str(dtype).removeprefix('torch.')}"
    need, there = needs(config, described, plans, dtype=dtype, context=context), available(device)
    if need is None or there is None:
        why = "the target's size cannot be counted" if need is None else f"{device} does not tell"
        return Finding(name=what, state="unknown", found=None, expected=there, advice=why)
    fits = need.total <= there
    tight = fits and need.total > _TIGHT * there
    advice = ""
    if not fits:
        advice = "Use a smaller type (--dtype bfloat16), fewer rows, a shorter --context"
        advice += ", or --device-map auto." if device.type == "cuda" else ", or a smaller target."
    elif tight:
        advice = "It is tight: close other programs, or plan for fewer tokens."
    return Finding(
        name=what,
        state="problem" if not fits else "warning" if tight else "ok",
        found=str(need),
        expected=f"{gigabytes(there)} free on {device}",
        advice=advice,
    )


def available(device: torch.device) -> int | None:
    """Free bytes on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def gigabytes(size: int) -> str:
    """As people read it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _cached_width(described: AnyDescription) -> int:
    """Numbers a token in the drafter's own keys, over all its layers."""
    config = described.config
    if isinstance(config, DrafterConfig):
        return config.num_layers * config.num_kv_heads * config.head_dim
    return config.num_kv_heads * config.head_dim if isinstance(config, Eagle3Config) else 0


def _taps(described: AnyDescription) -> int:
    """States of the target that are kept for the drafter."""
    config = described.config
    if config is None:
        return 0
    return len(config.target_layer_ids) or 1  # Medusa reads what the lm_head reads


def _parameters(config: Any) -> int | None:
    """Numbers in a model of this configuration, tied ones once, nothing allocated."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError, KeyError):
        return None
    return sum(int(parameter.numel()) for parameter in model.parameters())
