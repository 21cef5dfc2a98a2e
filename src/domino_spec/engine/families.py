"""Which targets the lean forward can run; the rest go through Transformers, for a stated reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from domino_spec.targets import Target
from domino_spec.targets.support import SLIDING_ATTENTION, layer_types

FAMILIES: tuple[type[nn.Module], ...] = (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    MistralForCausalLM,
)
_DTYPES = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the forward needs to know besides the weights."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    """A sliding window a layer, None for full attention."""


def draft_shape(config: Any, windows: tuple[int | None, ...]) -> Shape:
    """The shape of a drafter's layers, by its own configuration."""
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        windows=windows,
    )


def read_shape(config: Any) -> Shape:
    """The shape of a Llama-like configuration."""
    heads = int(config.num_attention_heads)
    window = getattr(config, "sliding_window", None)
    return Shape(
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        eps=float(config.rms_norm_eps),
        windows=tuple(
            window if kind == SLIDING_ATTENTION else None for kind in layer_types(config)
        ),
    )


def unsupported_reason(target: Target) -> str | None:
    """What keeps a target off the lean forward, in words; None if nothing does."""
    model, config = target.model, target.config
    if type(model) not in FAMILIES:
        names = ", ".join(family.__name__ for family in FAMILIES)
        return f"it is a {type(model).__name__}; the lean forward knows {names}"
    if target.device.type not in ("cpu", "cuda"):
        return f"it is on {target.device}; the lean forward runs on CPUs and CUDA"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if (target.embedding_scale, target.logit_scale, target.logit_softcap) != (1.0, 1.0, None):
        return "it scales its embeddings or logits"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        return f"its rotary positions ({kind}) change with the length"
    size = read_shape(config).head_dim
    if target.device.type == "cuda" and not kernels_take(size):
        return f"its heads are {size} wide; the kernels want a power of two, 16 or more"
    hooked = hooked_modules(model)
    if hooked:
        return f"its {hooked[0]} has a hook, which the lean forward would not call"
    return _why_not_plain(target, model)


def hooked_modules(model: nn.Module) -> list[str]:
    """Names of modules whose forward somebody listens to or changes.

    Transformers' own hooks, which collect outputs when it is asked for them, do neither.
    """
    return [name or "model" for name, module in model.named_modules() if _is_hooked(module)]


def _is_hooked(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    own = "transformers.utils.output_capturing"
    # A forward of the object's own, in place of its class's, is a hook by another name.
    return "forward" in vars(module) or any(getattr(h, "__module__", "") != own for h in hooks)


def kernels_take(head_dim: int) -> bool:
    """Whether attention's kernels can be compiled for heads so wide."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def _why_not_plain(target: Target, model: Any) -> str | None:
    modules = {"lm_head": target.lm_head} | {
        f"layer {index} {name}": layer.get_submodule(name)
        for index, layer in enumerate(target.layers)
        for name in _PROJECTIONS
    }
    for name, module in modules.items():
        if type(module) is not nn.Linear or hasattr(module, "_hf_hook"):
            return f"its {name} is a {type(module).__name__} (quantised, adapted or off-loaded)"
    for layer in target.layers:
        plain = [layer.get_submodule(name).bias is None for name in _PROJECTIONS]
        if not all(plain[4:]):
            return "its MLP has biases"
        if len(set(plain[:3])) != 1:
            return "some of its query, key and value projections have biases and some have none"
    if type(target.embedding) is not nn.Embedding:
        return f"its embedding is a {type(target.embedding).__name__}"
    places = {(p.device, p.dtype) for p in model.parameters()}
    if len(places) != 1:
        return f"its weights are of {len(places)} kinds or places; the lean forward wants one"
    dtype = places.pop()[1]
    if dtype not in _DTYPES[target.device.type]:
        return f"its weights are {dtype}"
    return None


@torch.no_grad()
def rotary_table(rotary: nn.Module, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, [capacity, head_dim] in float32."""
    positions = torch.arange(capacity, device=device).unsqueeze(0)
    like = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
    cos, sin = rotary(like, positions)
    return cos[0].float().contiguous(), sin[0].float().contiguous()
