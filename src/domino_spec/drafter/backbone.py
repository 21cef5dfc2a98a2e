"""The parallel backbone: one forward proposes every slot of a block at once.

A layer's queries come from the block, its keys and values from context and block alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from domino_spec.drafter.config import SLIDING_ATTENTION, DrafterConfig, Eagle3Config
from domino_spec.drafter.masks import (
    ALL_CONTEXT,
    BlockLayout,
    Mask,
    Window,
    block_positions,
    dense_mask,
    flex_mask,
)

KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each [batch, kv heads, positions, head_dim]."""

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, each [batch, positions, head_dim]."""

_INITIAL_STD = 0.02
_INTO_THE_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def rotate(states: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to [batch, heads, positions, head_dim]."""
    cos, sin = (part.unsqueeze(1).to(states.dtype) for part in rotary)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention under a boolean mask (True = visible) or FlexAttention's form."""
    if isinstance(mask, BlockMask):
        mixed = flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)
        assert isinstance(mixed, Tensor)
        return mixed
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class DraftAttention(nn.Module):
    """Attention whose keys and values come from one projection of context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotary: Rotary) -> KeyValue:
        """Project [batch, positions, hidden]; context features and block states come here alike."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(states))), rotary)
        return keys, self._heads(self.v_proj(states))

    def forward(self, states: Tensor, context: KeyValue, rotary: Rotary, mask: Mask) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(states))), rotary)
        block_keys, block_values = self.keys_values(states, rotary)
        keys = torch.cat((context[0], block_keys), dim=2)
        values = torch.cat((context[1], block_values), dim=2)
        mixed = attend(query, keys, values, mask)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, states: Tensor) -> Tensor:
        # [batch, positions, heads * head_dim] -> [batch, heads, positions, head_dim]
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return output


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP. The context feature skips the layer's input norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, context: KeyValue, rotary: Rotary, mask: Mask) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), context, rotary, mask)
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Backbone(nn.Module):
    """Fuses captured hidden states to context and runs blocks of [anchor, MASK, ...] over it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary = RotaryPositions(config)
        # How the mask is given to attention: training on CUDA asks for FlexAttention's form.
        self.attention: Literal["dense", "flex"] = "dense"
        # What is read in place of the layers' own windows, as decoding asks for it.
        self.draft_window: Window | None = None

    def context(self, captured: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of every layer for states [batch, n, captured layers * hidden]."""
        feature = self.hidden_norm(self.fc(captured))  # [batch, n, hidden]
        rotary = self.rotary(feature, positions)
        layers = (layer for layer in self.layers if isinstance(layer, DraftLayer))
        return [layer.self_attn.keys_values(feature, rotary) for layer in layers]

    def forward(
        self,
        embeddings: Tensor,  # [batch, anchors * block, hidden]
        *,
        anchors: Tensor,  # [batch, anchors]
        context: Sequence[KeyValue],
        context_positions: Tensor,  # [batch, context]
        anchor_documents: Tensor | None = None,
        context_documents: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of all slots, [batch, anchors * block, hidden]."""
        block_size = embeddings.shape[1] // anchors.shape[1]
        rotary = self.rotary(embeddings, block_positions(anchors, block_size))
        layout = BlockLayout(
            anchors=anchors,
            block_size=block_size,
            context_positions=context_positions,
            anchor_documents=anchor_documents,
            context_documents=context_documents,
        )
        kinds = self.config.layer_types
        masks = {kind: self._mask(layout, kind) for kind in set(kinds)}
        states = embeddings
        for layer, kind, layer_context in zip(self.layers, kinds, context, strict=True):
            states = layer(states, layer_context, rotary, masks[kind])
        output: Tensor = self.norm(states)
        return output

    def _mask(self, layout: BlockLayout, kind: str) -> Mask:
        window = layer_window(self.config, kind, self.draft_window)
        causal = kind == SLIDING_ATTENTION and self.config.causal_window
        if self.attention == "flex":
            compiled = layout.anchors.device.type == "cuda"
            return flex_mask(layout, window=window, causal=causal, compiled=compiled)
        return dense_mask(layout, window=window, causal=causal)

    @staticmethod
    def _attention(layer: nn.Module) -> DraftAttention:
        assert isinstance(layer, DraftLayer)
        return layer.self_attn


class RotaryPositions(Qwen3RotaryEmbedding):  # type: ignore[misc]
    """Rotary angles from the drafter's own parameters, always computed in float32."""

    def __init__(self, config: DrafterConfig | Eagle3Config) -> None:
        super().__init__(
            Qwen3Config(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        # `.to(bfloat16)` must not round the frequencies: far positions would collapse.
        exact = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def layer_window(
    config: DrafterConfig, kind: str, draft_window: Window | None = None
) -> Window | None:
    """What a layer of this kind sees of its context, None for all: `draft_window` or its own."""
    if draft_window is not None:
        return None if draft_window == ALL_CONTEXT else draft_window
    if kind != SLIDING_ATTENTION:
        return None
    assert config.sliding_window is not None
    return Window(config.sliding_window)


@torch.no_grad()
def initialise_layers(module: nn.Module, generator: torch.Generator, *, layers: int) -> None:
    """Small normal matrices, smaller still where a layer adds to the residual; norms of one."""
    damped = _INITIAL_STD / (2 * layers) ** 0.5
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            std = damped if name.endswith(_INTO_THE_RESIDUAL) else _INITIAL_STD
            parameter.normal_(0.0, std, generator=generator)
