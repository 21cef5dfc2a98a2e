"""EAGLE-3 on the engine: a layer over slots, as the target's own are.

Row p of its cache comes of token p's feature and of token p + 1. What the target reads leaves
features and tokens in slots; so a block that was verified gives the rows from the token before it
up to the last but one, whose next tokens stand in the block. The row of a slot's last token waits
for the anchor: the first step of the next chain writes it, or the next block does. What a chain or
a refused draft wrote is written over before anybody sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from domino_spec.baselines.eagle3 import Eagle3
from domino_spec.baselines.lean_output import LeanOutput, placed
from domino_spec.engine.attention import AttentionMetadata, run_attention, store_context
from domino_spec.engine.cache import SlotCache
from domino_spec.engine.kernels.linear import Normed, linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.base import InferenceModel, draft_shape, rotary_table
from domino_spec.engine.models.llama import run_rest
from domino_spec.engine.sampling import Draws
from domino_spec.engine.sources import InSlots, SlotStates
from domino_spec.engine.weights import LayerWeights, join


class Eagle3Memory:
    """The layer's keys and values, and the features and tokens that they come of."""

    def __init__(self, keys: SlotCache, features: SlotStates, tokens: SlotStates) -> None:
        self.keys, self.features, self.tokens = keys, features, tokens
        self._parts = (keys, features, tokens)

    def twin(self) -> Eagle3Memory:
        """Of the same shape; to be resized before use."""
        return Eagle3Memory(self.keys.twin(), self.features.twin(), self.tokens.twin())

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots."""
        for part in self._parts:
            part.resize(slots=slots, capacity=capacity)

    def free(self) -> None:
        """No slots at all."""
        for part in self._parts:
            part.free()

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another."""
        for part in self._parts:
            part.copy(source, goal, count)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(part.nbytes for part in self._parts)


class LeanEagle3(InSlots[Eagle3Memory]):
    """One layer, run as often as there are drafts."""

    def __init__(
        self, drafter: Eagle3, target: InferenceModel, *, slots: int, capacity: int, pack: bool
    ) -> None:
        drafter = placed(drafter, target)
        config, layer = drafter.config, drafter.layer
        self.config = config
        self.taps: Sequence[int] = drafter.taps
        self._embedding = target.embedding
        self._output = LeanOutput(target, drafter.draft_tokens, pack=pack)
        self._shape = draft_shape(config, (None,))
        self._feature_norm = layer.hidden_norm.weight.detach()
        self._norm = drafter.norm.weight.detach()
        self._fc: Weight = drafter.fc.weight.detach()
        projections = join([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
        # Of context rows only keys and values are wanted: what stands behind the queries'.
        self._kv: Weight = projections[config.num_heads * config.head_dim :]
        self._weights = LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),  # of the embedding
            qkv=projections,
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=layer.o_proj.weight.detach(),
            out_bias=None,
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=join([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            down=layer.mlp.down_proj.weight.detach(),
        )
        if pack:
            self._fc, self._kv = packed(self._fc), packed(self._kv)
            self._weights = self._weights.packed()
        self._positions, self._device = drafter.rotary, target.device
        self._rotary = rotary_table(self._positions, capacity, target.device)
        sizes: dict[str, Any] = {"slots": slots, "capacity": capacity, "device": target.device}
        self.cache = Eagle3Memory(
            SlotCache(
                layers=1,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=target.dtype,
                **sizes,
            ),
            SlotStates(config.hidden_size, dtype=target.dtype, **sizes),
            SlotStates(dtype=torch.long, **sizes),
        )

    @property
    def facts(self) -> list[Any]:
        """Whatever changes what its drafts cost."""
        return [self.config.to_dict()]

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""
        super().resize(slots=slots, capacity=capacity)
        self._rotary = rotary_table(self._positions, capacity, self._device)

    def observe(self, taps: Tensor, tokens: Tensor, rows: AttentionMetadata) -> None:
        """Features and tokens into slots, then the rows whose next token is known."""
        cache, count = self.cache, rows.count
        cache.features.write(linear(taps, self._fc).view(*tokens.shape, -1), rows)
        cache.tokens.write(tokens, rows)
        behind = AttentionMetadata(rows.slots, self._lasts(rows), count)
        places = cache.features.places(behind.starts, count)
        features = cache.features.read(rows.slots, places).flatten(0, 1)
        following = cache.tokens.read(rows.slots, cache.tokens.places(behind.starts + 1, count))
        kv = linear(self._joined(following.flatten(), features), self._kv)
        store_context(kv, None, cache.keys.layers, self._rotary, behind, self._shape)

    def propose(self, anchors: Tensor, rows: AttentionMetadata, depth: int, draws: Draws) -> Tensor:
        """One token after the other, each from the last one and the drafter's own feature."""
        features, tokens, drafts = self._last_features(rows), anchors, []
        for step in range(depth):
            states = self._step(tokens, features, rows, step)
            features = states.rows
            tokens = self._output.next_tokens(states, rows.starts + step, draws)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def chooser(
        self, anchors: Tensor, rows: AttentionMetadata, depth: int
    ) -> Callable[[Draws], Tensor]:
        """All of it: every step reads what the one before chose."""
        return lambda draws: self.propose(anchors, rows, depth, draws)

    def _step(self, tokens: Tensor, features: Tensor, rows: AttentionMetadata, step: int) -> Normed:
        """The layer over one token a row; its output is the next step's feature."""
        place = AttentionMetadata(rows.slots, self._lasts(rows) + step, 1)
        qkv = linear(self._joined(tokens, features), self._weights.qkv)
        mixed = run_attention(
            qkv, self.cache.keys.layer(0), self._rotary, place, self._shape, causal=True
        )  # fmt: skip
        return run_rest(mixed, features, self._weights, self._shape, norm=self._norm)

    def _last_features(self, rows: AttentionMetadata) -> Tensor:
        features = self.cache.features
        return features.read(rows.slots, features.places(self._lasts(rows), 1))[:, 0]

    def _lasts(self, rows: AttentionMetadata) -> Tensor:
        """Where each row's last token stands; the spare slot's rows have none."""
        return (rows.starts - 1).clamp(min=0)

    def _joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        """[n, 2 * hidden]: a token's embedding and the feature before it, both normed."""
        eps = self._shape.eps
        embedded = rms_norm(self._embedding[tokens], self._weights.input_norm, eps)
        return torch.cat((embedded, rms_norm(features, self._feature_norm, eps)), dim=1)
