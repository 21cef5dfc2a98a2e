"""EAGLE-3: one layer that reads a token and a feature, and goes on with its own features.

At position p it reads the feature of token p, fused from the target's captured hidden states, and
the embedding of token p + 1; it predicts token p + 2. Where the target has not been yet, its own
output at that position takes the feature's place. Training unrolls the same steps (`Eagle3.unroll`)
from many positions at once, over the true tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.provenance import Provenance
from domino_spec.decoding.drafter import Drafter, DraftSampler
from domino_spec.drafter import TargetVocabulary
from domino_spec.drafter.backbone import RotaryPositions
from domino_spec.drafter.initial import initialise_layers
from domino_spec.drafter.layers import DraftMLP, KeyValue, Rotary, rotate
from domino_spec.drafters.base import DraftModule, placed, unsupported_heads, vocabulary_of
from domino_spec.drafters.config import Eagle3Config
from domino_spec.engine.attention import AttentionMetadata, run_attention, store_context
from domino_spec.engine.cache import SlotCache, SlotStates
from domino_spec.engine.kernels.linear import Normed, linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.base import InferenceModel, draft_shape, rotary_table
from domino_spec.engine.models.llama import run_rest
from domino_spec.engine.weights import LayerWeights, join
from domino_spec.targets import Target

NextTokens = Callable[[int, Tensor], Tensor]
"""(step, its output states [batch, starts, hidden]) -> tokens to read [batch, starts]."""


class Eagle3Layer(nn.Module):
    """Llama's layer with queries, keys and values from [embedding ; feature], both normed."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * hidden, heads, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(hidden, config.intermediate_size)

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What is projected, [batch, n, 2 * hidden]."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)

    def keys_values(self, joined: Tensor, rotary: Rotary) -> KeyValue:
        """Keys and values of these positions."""
        keys = rotate(self._heads(self.k_proj(joined)), rotary)
        return keys, self._heads(self.v_proj(joined))

    def forward(
        self,
        joined: Tensor,
        features: Tensor,
        rotary: Rotary,
        context: KeyValue,
        visible: Tensor,  # [batch, starts, context] bool
        chain: Sequence[KeyValue],  # of each step after the context, [batch, kv heads, starts, ..]
    ) -> Tensor:
        query = rotate(self._heads(self.q_proj(joined)), rotary)
        mixed = _attend(query, context, visible, chain)
        states: Tensor = features + self.o_proj(mixed.transpose(1, 2).flatten(2))
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output

    def _heads(self, states: Tensor) -> Tensor:
        # [batch, n, heads * head_dim] -> [batch, heads, n, head_dim]
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)


def _attend(query: Tensor, context: KeyValue, visible: Tensor, chain: Sequence[KeyValue]) -> Tensor:
    """Attention of each start to what it sees of the context and to its own chain alone.

    All starts share the context, so that is one product; a chain is a few keys for each start.
    """
    keys, values = context
    batch, heads, starts, size = query.shape
    grouped = query.view(batch, keys.shape[1], -1, starts, size)  # [batch, kv heads, group, ...]
    scores = torch.einsum("rkgsd,rknd->rkgsn", grouped, keys)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if chain:
        chain_keys, chain_values = (torch.stack(part, dim=3) for part in zip(*chain, strict=True))
        own = torch.einsum("rkgsd,rksjd->rkgsj", grouped, chain_keys)
        scores = torch.cat((scores, own), dim=-1)
    shares = torch.softmax(scores.float() * size**-0.5, dim=-1).to(values.dtype)
    mixed = torch.einsum("rkgsn,rknd->rkgsd", shares[..., : keys.shape[2]], values)
    if chain:
        later = shares[..., keys.shape[2] :]
        mixed = mixed + torch.einsum("rkgsj,rksjd->rkgsd", later, chain_values)
    return mixed.reshape(batch, heads, starts, size)


class Eagle3(DraftModule[Eagle3Config]):
    """The drafter: fused hidden states in, a chain of hidden states out."""

    def __init__(self, config: Eagle3Config, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.layer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary = RotaryPositions(config)

    def initialise(self, generator: torch.Generator) -> None:
        """Small normal matrices, norms of one."""
        initialise_layers(self, generator, layers=1)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The fused layers."""
        return self.config.target_layer_ids

    @property
    def reads(self) -> dict[str, str]:
        """The fusion of the captured states."""
        return {"fc.weight": "captured"}

    @property
    def output_norm(self) -> Tensor:
        """The final norm's weight."""
        return self.norm.weight

    def compute_buffers(self, device: torch.device) -> None:
        """The rotary frequencies, which the meta device left without values."""
        self.rotary = RotaryPositions(self.config).to(device)

    def features(self, captured: Tensor) -> Tensor:
        """Captured states [batch, n, captured layers * hidden] fused, [batch, n, hidden]."""
        fused: Tensor = self.fc(captured.to(self.device, self.dtype))
        return fused

    def context(
        self,
        target: TargetVocabulary,
        features: Tensor,  # [batch, n, hidden]
        following: Tensor,  # [batch, n]: the token after each feature's own
        positions: Tensor,  # [batch, n]
    ) -> KeyValue:
        """Keys and values of the positions whose features are the target's."""
        joined = self.layer.join(self.embed(target, following), features)
        return self.layer.keys_values(joined, self.rotary(features, positions))

    def unroll(
        self,
        target: TargetVocabulary,
        *,
        features: Tensor,  # [batch, starts, hidden]: the last the target gave, of each chain
        anchor_tokens: Tensor,  # [batch, starts]: the token after it
        positions: Tensor,  # [batch, starts]: of the features
        context: KeyValue,
        visible: Tensor,  # [batch, starts, context] bool: what each chain sees, its start included
        steps: int,
        next_tokens: NextTokens,
    ) -> Tensor:
        """Hidden states of each draft of each chain, [batch, starts, steps, hidden].

        The one forward: training starts chains all over a sequence and reads the true tokens,
        decoding starts one a sequence after the cached context and reads what it drafted. A step
        sees the context up to its chain's start and the steps of its own chain.
        """
        tokens, outputs = anchor_tokens, []
        chain: list[KeyValue] = []
        for step in range(steps):
            joined = self.layer.join(self.embed(target, tokens), features)
            rotary = self.rotary(features, positions + step)
            if step:  # the first step's keys are the context's
                chain.append(self.layer.keys_values(joined, rotary))
            features = self.layer(joined, features, rotary, context, visible, chain)
            hidden = self.norm(features)
            outputs.append(hidden)
            if step + 1 < steps:
                tokens = next_tokens(step, hidden)
        return torch.stack(outputs, dim=2)

    def forward(
        self,
        target: TargetVocabulary,
        *,
        captured: Tensor,  # [batch, n, captured layers * hidden]
        tokens: Tensor,  # [batch, n]
        anchors: Tensor,  # [batch, anchors]: indices into the sequence
        positions: Tensor,  # [batch, n]: restart with each packed document
        documents: Tensor | None = None,  # [batch, n]
        steps: int | None = None,
    ) -> Tensor:
        """Training-time test: chains from every anchor of known sequences, over true tokens.

        [batch, anchors, steps, hidden]; draft j of anchor a guesses tokens[a + 1 + j]. A chain
        starts at the token before its anchor.
        """
        last = tokens.shape[1] - 1
        following = torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1)
        features = self.features(captured)
        starts = (anchors - 1).clamp(min=0)
        begun = positions.gather(1, starts)
        visible = positions.unsqueeze(1) <= begun.unsqueeze(2)  # [batch, anchors, n]
        if documents is not None:
            own = documents.gather(1, starts).unsqueeze(2)
            visible = visible & (documents.unsqueeze(1) == own)

        def truth(step: int, _hidden: Tensor) -> Tensor:
            # A chain that runs over the end repeats the last token; such drafts have no label.
            return tokens.gather(1, (anchors + 1 + step).clamp(max=last))

        return self.unroll(
            target,
            features=features.gather(1, starts.unsqueeze(2).expand(-1, -1, features.shape[2])),
            anchor_tokens=tokens.gather(1, anchors),
            positions=begun,
            context=self.context(target, features, following, positions),
            visible=visible,
            steps=self.config.unrolled if steps is None else steps,
            next_tokens=truth,
        )


class Eagle3Drafter(Drafter):
    """One layer over slots, as the target's own are, run as often as there are drafts.

    Position p of its cache is made from token p's feature and token p + 1. What the target reads
    leaves features and tokens in slots; so a verified block gives the positions from the token
    before it up to the last but one, whose next tokens are in the block. The position of a slot's
    last token waits for the anchor: the first step of the next chain writes it, or the next block
    does. What a chain or a refused draft wrote is written over before it is seen.
    """

    kind = "eagle3"
    model: Eagle3
    config: Eagle3Config

    def __init__(
        self, model: Eagle3, *, name: str | None = None, provenance: Provenance | None = None
    ) -> None:
        self.model, self.config = model, model.config
        self.capture_layers = model.capture_layers
        self.default_depth = model.config.default_depth
        self.max_depth = model.config.max_depth
        super().__init__(name=name, provenance=provenance)

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Heads that the kernels do not take."""
        return unsupported_heads(self.config.head_dim, device)

    def _bind(self, model: Target | InferenceModel, *, pack: bool) -> None:
        module: Eagle3 = placed(self.model, model)
        config, layer = self.config, module.layer
        self._dtype = module.dtype
        self._vocabulary = vocabulary_of(model, module, pack=pack)
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

    def resize(self, *, slots: int, capacity: int) -> None:
        super().resize(slots=slots, capacity=capacity)
        self._rotary = rotary_table(self._rotary_module, capacity, self.device)

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
