"""EAGLE-3 in both loops: its layer over slots, as the target's own are."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.decoding.drafter import DraftSampler
from domino_spec.drafter import Eagle3, Eagle3Config
from domino_spec.drafters.base import ModelDrafter
from domino_spec.engine.attention import AttentionMetadata, run_attention, store_context
from domino_spec.engine.cache import SlotCache, SlotStates
from domino_spec.engine.kernels.linear import Normed, linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.base import InferenceModel, draft_shape
from domino_spec.engine.models.llama import run_rest
from domino_spec.engine.weights import LayerWeights, join
from domino_spec.targets import Target


class Eagle3Drafter(ModelDrafter):
    """One layer over slots, as the target's own are, run as often as there are drafts.

    Position p of its cache is made from token p's feature and token p + 1. What the target reads
    leaves features and tokens in slots; so a verified block gives the positions from the token
    before it up to the last but one, whose next tokens are in the block. The position of a slot's
    last token waits for the anchor: the first step of the next chain writes it, or the next block
    does. What a chain or a refused draft wrote is written over before it is seen.
    """

    config: Eagle3Config
    reads_next = True

    def _bind(self, model: Target | InferenceModel, *, pack: bool) -> None:
        module: Eagle3 = self._place(model, pack=pack)
        config, layer = self.config, module.layer
        self._shape = draft_shape(config, (None,))
        self._feature_norm = layer.hidden_norm.weight.detach()
        self._norm = module.norm.weight.detach()
        self._fc: Weight = module.fc.weight.detach()
        projections = join([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)])
        # Of the context only keys and values are wanted: what stands after the queries'.
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
        self._rotary_module = module.rotary
        self._keys = SlotCache(
            layers=1,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
            device=self.device,
        )
        self._features = SlotStates(config.hidden_size, dtype=self._dtype, device=self.device)
        self._tokens = SlotStates(dtype=torch.long, device=self.device)
        self.caches = (self._keys, self._features, self._tokens)

    def update_cache(
        self, captured: Tensor, tokens: Tensor, *, slots: Tensor, starts: Tensor
    ) -> None:
        """Features and tokens into slots, then the positions whose next token is known."""
        count = tokens.shape[1]
        features = linear(captured.to(self.device, self._dtype), self._fc)
        self._features.write(features.view(*tokens.shape, -1), slots, starts)
        self._tokens.write(tokens, slots, starts)
        metadata = AttentionMetadata(slots, _lasts(starts), count)
        places = self._features.places(metadata.starts, count)
        features = self._features.read(slots, places).flatten(0, 1)
        following = self._tokens.read(slots, self._tokens.places(metadata.starts + 1, count))
        kv = linear(self._joined(following.flatten(), features), self._kv)
        store_context(kv, None, self._keys.layers, self._rotary, metadata, self._shape)

    def propose(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,
    ) -> Tensor:
        """One token after the other, each from the last one and the drafter's own feature."""
        features = self._features.read(slots, self._features.places(_lasts(starts), 1))[:, 0]
        tokens, drafts = anchors, []
        for step in range(depth):
            states = self._step(
                tokens, features, AttentionMetadata(slots, _lasts(starts) + step, 1)
            )
            features = states.rows
            logits = self._vocabulary.logits(states).unsqueeze(1)
            tokens = sampler.choose_drafts(logits, starts + step, self._vocabulary.tokens)[:, 0]
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def _step(self, tokens: Tensor, features: Tensor, metadata: AttentionMetadata) -> Normed:
        """The layer over one token each; its output is the next step's feature."""
        qkv = linear(self._joined(tokens, features), self._weights.qkv)
        mixed = run_attention(
            qkv, self._keys.layer(0), self._rotary, metadata, self._shape, causal=True
        )
        return run_rest(mixed, features, self._weights, self._shape, norm=self._norm)

    def _joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        """[n, 2 * hidden]: a token's embedding and the feature before it, both normed."""
        eps = self._shape.eps
        embedding = rms_norm(self._vocabulary.embed(tokens), self._weights.input_norm, eps)
        return torch.cat((embedding, rms_norm(features, self._feature_norm, eps)), dim=1)


def _lasts(starts: Tensor) -> Tensor:
    """Where the last token before each start stands; the spare slot has none."""
    return (starts - 1).clamp(min=0)
