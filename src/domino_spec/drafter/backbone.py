"""The parallel backbone: one forward proposes every slot of a block at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from domino_spec.drafter.config import SLIDING_ATTENTION, DrafterConfig
from domino_spec.drafter.layers import DraftAttention, DraftLayer, KeyValue
from domino_spec.drafter.masks import BlockLayout, Mask, block_positions, dense_mask, flex_mask


class Backbone(nn.Module):
    """Fuses captured hidden states to context and runs blocks of [anchor, MASK, ...] over it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.num_captured_layers * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary = RotaryPositions(config)
        # How the mask is given to attention: training on CUDA asks for FlexAttention's form.
        self.attention: Literal["dense", "flex"] = "dense"

    def context(self, captured: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of every layer for states [batch, n, captured layers * hidden]."""
        feature = self.hidden_norm(self.fc(captured))  # [batch, n, hidden]
        rotary = self.rotary(feature, positions)
        return [self._attention(layer).keys_values(feature, rotary) for layer in self.layers]

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
        window = self.config.sliding_window if kind == SLIDING_ATTENTION else None
        causal = self.config.causal_window
        if self.attention == "flex":
            compiled = layout.anchors.device.type == "cuda"
            return flex_mask(layout, window=window, causal=causal, compiled=compiled)
        return dense_mask(layout, window=window, causal=causal)

    @staticmethod
    def _attention(layer: nn.Module) -> DraftAttention:
        assert isinstance(layer, DraftLayer)
        return layer.self_attn


class RotaryShape(Protocol):
    """What rotary angles depend on."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def rope_parameters(self) -> Mapping[str, Any]: ...


class RotaryPositions(Qwen3RotaryEmbedding):  # type: ignore[misc]
    """Rotary angles from the drafter's own parameters, always computed in float32."""

    def __init__(self, config: RotaryShape) -> None:
        super().__init__(_rotary_config(config))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        # `.to(bfloat16)` must not round the frequencies: far positions would collapse.
        exact = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def _rotary_config(config: RotaryShape) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
