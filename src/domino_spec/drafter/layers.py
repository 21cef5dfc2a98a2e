"""One draft layer: queries from the block, keys and values from context and block alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from domino_spec.drafter.config import DrafterConfig
from domino_spec.drafter.masks import Mask

KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each [batch, kv heads, positions, head_dim]."""

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, each [batch, positions, head_dim]."""


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
