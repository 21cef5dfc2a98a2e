"""Block drafters (Domino, DFlash, Markov): one forward drafts a block, then the head rolls out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from domino_spec.checkpoints.provenance import Provenance
from domino_spec.decoding.drafter import DraftPart, DraftSampler, SequenceSampler
from domino_spec.drafter import DraftModel
from domino_spec.drafter.backbone import layer_window
from domino_spec.drafter.config import SLIDING_ATTENTION, DrafterConfig
from domino_spec.drafter.heads import DominoHead, Head
from domino_spec.drafter.masks import ALL_CONTEXT, Window
from domino_spec.drafter.rollout import roll
from domino_spec.drafter.tree import DraftTree, grow, tree_nodes
from domino_spec.drafters.base import ModelDrafter, WeightVocabulary
from domino_spec.engine.attention import AttentionMetadata, store_context
from domino_spec.engine.cache import SlotCache
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.linear import linear, linear_then_norm
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.rollout import CANDIDATES, default_candidates, roll_out
from domino_spec.engine.kernels.topk import top_candidates
from domino_spec.engine.kernels.trees import grow_tree
from domino_spec.engine.models.base import InferenceModel, Shape, apply_norm, draft_shape
from domino_spec.engine.models.llama import run_layer, run_stack, stack_of
from domino_spec.engine.sampling import Draws
from domino_spec.engine.weights import LayerWeights, adopt_layers, nbytes
from domino_spec.errors import CheckpointError, InputError
from domino_spec.quantization import BLOCK, QuantizedWeight
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.drafts import DraftContext, DraftRollout
from domino_spec.quantization.memory import give_back_freed
from domino_spec.targets import Target

DRAFT_SINKS = 0
"""Sink tokens that are read besides a window, unless another number is asked for.

None: from far away they cost the released drafters nearly all of their acceptance.
"""


class BlockDrafter(ModelDrafter):
    """A draft model and the keys and values of the tokens its target has verified."""

    model: DraftModel
    config: DrafterConfig
    cache: SlotCache

    def __init__(
        self,
        model: DraftModel,
        *,
        candidates: int | None = None,
        window: Window | None = None,
        name: str | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        self.candidates = check_candidates(candidates)
        self.window = window
        self.lookahead = model.config.block_size
        super().__init__(model, name=name, provenance=provenance)

    # Bound to a model -----------------------------------------------------------------------

    def _bind(self, model: Target | InferenceModel, *, pack: bool) -> None:
        module: DraftModel = self._place(model, pack=pack)
        config = self.config
        self._head = module.head
        self._shape: Shape = draft_shape(
            config,
            tuple(layer_window(config, kind, self.window) for kind in config.layer_types),
        )
        backbone = module.backbone
        self._fc: Weight = backbone.fc.weight.detach()
        self._hidden_norm = backbone.hidden_norm.weight.detach()
        self._norm = backbone.norm.weight.detach()
        self._layers: list[LayerWeights]
        self._layers, projections = adopt_layers(backbone.layers)
        # Of context tokens only keys and values are wanted: the rows after the queries'.
        self._kv: Weight = projections[:, config.num_heads * config.head_dim :]
        norms = [w.k_norm for w in self._layers if w.k_norm is not None]
        self._k_norm = torch.stack(norms) if norms else None
        self._rotary_module = backbone.rotary
        self._masks = torch.full(
            (1, config.block_size - 1), config.mask_token_id, device=self.device
        )
        self._context: DraftContext | None = None
        self._rollout: DraftRollout | None = None
        if pack and isinstance(model, InferenceModel) and model.shape.batch_invariant:
            # As its target's, whose drafts it makes: reading weights is what a step takes.
            self._quantize()
            self._rollout = self._rollout_of(module.head)
        elif pack:
            self._fc = packed(self._fc)
            self._kv = packed(self._kv.flatten(0, 1))
            self._layers = [weights.packed() for weights in self._layers]
        self._stack = stack_of(self._layers, self._shape)
        self.cache = SlotCache(
            layers=len(self._layers),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
            device=self.device,
        )
        self.caches = (self.cache,)

    def _quantize(self) -> None:
        """Matrices in blocks of 8 bits, where all are a whole number of blocks wide."""
        fc, kv = cast("Tensor", self._fc), cast("Tensor", self._kv).flatten(0, 1)
        compiled = kernel()
        assert compiled is not None, "without it targets are loaded in float32"
        if self._dtype != torch.float32 or fc.shape[1] % BLOCK:
            return
        give_back_freed()  # what joining left: blocks come on top of the floats
        try:
            self._layers = [weights.quantized() for weights in self._layers]
        except CheckpointError:
            return
        self._fc, self._kv = (QuantizedWeight.quantize(each, "Q8_0") for each in (fc, kv))
        self._shape = replace(self._shape, batch_invariant=True)
        self._context = DraftContext(
            compiled, self._fc, self._kv, norm=self._hidden_norm.contiguous(), k_norms=self._k_norm,
            eps=self._shape.eps, layers=len(self._layers), kv_heads=self._shape.kv_heads,
        )  # fmt: skip

    def _rollout_of(self, head: Head | None) -> DraftRollout | None:
        """The head's rollout as the compiled kernel computes it; None where it cannot."""
        vocabulary, compiled = self._vocabulary, kernel()
        assert isinstance(vocabulary, WeightVocabulary)
        own = {"embedding": vocabulary.embedding, "lm_head": vocabulary.lm_head}
        assert compiled is not None, "without it targets are loaded in float32"
        if self._dtype != torch.float32 or not isinstance(head, DominoHead):
            return None
        weights = {
            name: weight for name, weight in own.items() if isinstance(weight, QuantizedWeight)
        }
        try:
            rounded = {
                name: QuantizedWeight.quantize(weight, "Q8_0")
                for name, weight in head.matrices().items()
            }
        except CheckpointError:  # not whole blocks
            return None
        if len(weights) < len(own):
            return None
        return DraftRollout(
            compiled, weights | rounded, bias=vocabulary.bias, tokens=vocabulary.tokens,
            uncorrected=head.prefix_len,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """With the context that it reads."""
        return {**super().describe(), **self.context_settings}

    @property
    def cost_key(self) -> list[Any]:
        """A window leaves keys and values unread."""
        return [*super().cost_key, self.window]

    @property
    def context_settings(self) -> dict[str, int]:
        """What was asked for in place of its layers' own windows, as the settings that ask."""
        if self.window is None:
            return {}
        if self.window == ALL_CONTEXT:
            return {"draft_window": 0}
        return {"draft_window": self.window.size, "draft_sinks": self.window.sink_tokens}

    def update_cache(
        self, captured: Tensor, tokens: Tensor, *, slots: Tensor, starts: Tensor
    ) -> None:
        """Context keys and values of captured hidden states."""
        self._store(captured, AttentionMetadata(slots, starts, tokens.shape[1]))

    def update_tree(
        self, captured: Tensor, tree: DraftTree, *, slots: Tensor, starts: Tensor
    ) -> None:
        """The same at the nodes' positions."""
        positions = starts.unsqueeze(1) + tree.depths
        count = tree.tokens.shape[1]
        self._store(captured, AttentionMetadata(slots, starts, count, positions=positions))

    def _store(self, captured: Tensor, metadata: AttentionMetadata) -> None:
        captured = captured.to(self.device, self._dtype)
        if self._context is not None:
            caches, rotary = self.cache.layers[:2], self._rotary
            places = metadata.per_token(caches[0].shape[3], len(rotary[0])).places
            self._context.store(captured, caches, rotary, places)
            return
        feature = linear_then_norm(captured, self._fc, self._hidden_norm, self._shape.eps)
        kv = linear(feature, self._kv)
        store_context(kv, self._k_norm, self.cache.layers, self._rotary, metadata, self._shape)

    def propose(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,
    ) -> Tensor:
        """One backbone forward, then the head's rollout."""
        hidden = self._hidden(anchors, slots, starts)[:, :depth]
        return self._roll_out(hidden, anchors, starts, sampler)

    def _hidden(self, anchors: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        """The backbone over a block each: states of each draft, [batch, max depth, hidden]."""
        config = self.config
        batch, block = anchors.shape[0], config.block_size
        tokens = torch.cat((anchors.unsqueeze(1), self._masks.expand(batch, -1)), dim=1)
        norms = [*(weights.input_norm for weights in self._layers), self._norm]
        states = self._vocabulary.embed_normed(tokens.flatten(), norms[0], self._shape.eps)
        metadata = AttentionMetadata(slots, starts, block)
        causal = [kind == SLIDING_ATTENTION and config.causal_window for kind in config.layer_types]
        if self._stack is not None:
            rows = run_stack(
                self._stack, states, self.cache.layers[:2], self._rotary, metadata, self._shape,
                causal=causal, outputs={},
            )  # fmt: skip
            hidden = apply_norm(rows, self._norm, self._shape)
            return hidden.view(batch, block, -1)[:, config.first_slot :]
        for index, weights in enumerate(self._layers):
            states = run_layer(
                states,
                weights,
                self.cache.layer(index),
                self._rotary,
                metadata,
                self._shape,
                causal=causal[index],
                window=self._shape.windows[index],
                norm=norms[index + 1],
            )
        hidden = apply_norm(states.rows, self._norm, self._shape)
        return hidden.view(batch, block, -1)[:, config.first_slot :]

    def _roll_out(
        self, hidden: Tensor, anchors: Tensor, starts: Tensor, sampler: DraftSampler
    ) -> Tensor:
        """Base logits of all drafts, then the head, one draft after the other.

        In one call where a compiled kernel can and no draft is drawn, or looked at later.
        """
        vocabulary = self._vocabulary
        plain = isinstance(sampler, Draws) and sampler.temperature is None and sampler.kept is None
        if self._rollout is not None and self.candidates is None and plain:
            return self._rollout.run(hidden, anchors)
        if self._head is None and self.candidates is None:
            logits = vocabulary.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
            return sampler.choose_drafts(logits, starts, vocabulary.tokens)
        candidates = self.candidates or default_candidates(self._head, hidden)
        common = self._base_logits(hidden, anchors, candidates)
        if isinstance(sampler, SequenceSampler):
            return roll(self._head, vocabulary.embed, choose=sampler.column, **common)
        assert isinstance(sampler, Draws)
        assert isinstance(vocabulary, WeightVocabulary)
        columns = common["columns"]
        drafts, kept = roll_out(
            self._head,
            embedding=vocabulary.embedding,
            noise=self._noise(sampler, starts),
            keep=sampler.kept is not None,
            **common,
        )
        if kept is not None:
            tokens = vocabulary.tokens
            if columns is not None:
                tokens = columns if tokens is None else tokens[columns]
            sampler.keep(kept, tokens)
        return drafts

    @staticmethod
    def _noise(sampler: Draws, starts: Tensor) -> Noise | None:
        if sampler.temperature is None:
            return None
        assert sampler.seeds is not None
        return Noise(sampler.temperature, sampler.seeds, starts + 1)

    def _base_logits(
        self, hidden: Tensor, anchors: Tensor, candidates: int | None
    ) -> dict[str, Any]:
        """What rollouts and trees begin with: base logits, of the best candidates or of all."""
        batch, depth, _ = hidden.shape
        vocabulary = self._vocabulary
        flat, columns = vocabulary.logits(hidden.flatten(0, 1)), None
        if candidates is not None and candidates < flat.shape[1]:
            fused = isinstance(vocabulary, WeightVocabulary)
            best = top_candidates(flat, candidates) if fused else flat.topk(candidates)
            flat, columns = best[0], best[1].view(batch, depth, -1)
        return {
            "hidden": hidden,
            "anchor_tokens": anchors,
            "base": flat.view(batch, depth, -1),
            "columns": columns,
            "draft_tokens": vocabulary.tokens,
        }

    # Trees ----------------------------------------------------------------------------------

    can_branch = True

    def propose_tree(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        nodes: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """One backbone forward, then the head's rollout along every branch."""
        hidden = self._hidden(anchors, slots, starts)[:, : min(depth, nodes)]
        base = self._base_logits(hidden, anchors, self.candidates or CANDIDATES)
        return self._grow(base, starts, nodes, sampler)

    def _grow(
        self, base: dict[str, Any], starts: Tensor, nodes: int, sampler: DraftSampler
    ) -> DraftTree:
        """A tree over base logits."""
        if isinstance(sampler, Draws) and isinstance(self._vocabulary, WeightVocabulary):
            embedding, noise = self._vocabulary.embedding, self._noise(sampler, starts)
            return grow_tree(self._head, embedding=embedding, **base, nodes=nodes, noise=noise)

        def scores(index: int, logits: Tensor, tokens: Tensor | None) -> Tensor:
            return sampler.tree_scores(index, logits, starts, tokens)

        return grow(self._head, self._vocabulary.embed, **base, nodes=nodes, scores=scores)

    def tree_nodes(self, nodes: int, depth: int) -> int:
        """As many as there are paths over the candidates."""
        width = min(self.candidates or CANDIDATES, self.config.output_vocab_size)
        return tree_nodes(nodes, depth, width)

    # Measured -------------------------------------------------------------------------------

    def parts(
        self,
        anchors: Tensor,
        *,
        slots: Tensor,
        starts: Tensor,
        depth: int,
        sampler: DraftSampler,
        cached: int,
        nodes: int = 0,
    ) -> list[DraftPart]:
        """The backbone, and the rollout over its states; or its logits and a tree over these."""
        hidden = self._hidden(anchors, slots, starts)[:, :depth].clone()
        layers = sum(weights.nbytes for weights in self._layers)
        backbone: DraftPart = (
            "draft backbone",
            lambda: self._hidden(anchors, slots, starts),
            layers + self._read_cache(cached),
        )
        if not nodes:
            return [
                backbone,
                ("draft logits and rollout",
                 lambda: self._roll_out(hidden, anchors, starts, sampler),
                 self._lm_head_bytes + self._head_bytes),
            ]  # fmt: skip
        candidates = self.candidates or CANDIDATES
        base = self._base_logits(hidden, anchors, candidates)
        return [
            backbone,
            ("draft logits", lambda: self._base_logits(hidden, anchors, candidates),
             self._lm_head_bytes),
            ("tree", lambda: self._grow(base, starts, nodes, sampler), self._head_bytes),
        ]  # fmt: skip

    def cycle_bytes(self, cached: int) -> int:
        """Its own weights and the lm_head once, and keys and values of the context."""
        layers = sum(weights.nbytes for weights in self._layers)
        own = layers + self.update_bytes + self._head_bytes
        return own + self._lm_head_bytes + self._read_cache(cached)

    @property
    def update_bytes(self) -> int:
        """The projection of captured hidden states."""
        return nbytes([self._fc])

    def _read_cache(self, cached: int) -> int:
        return cached * self.token_width * self.cache.element_size

    @property
    def _head_bytes(self) -> int:
        return 0 if self._head is None else nbytes(self._head.parameters())

    @property
    def _lm_head_bytes(self) -> int:
        assert isinstance(self._vocabulary, WeightVocabulary)
        return nbytes([self._vocabulary.lm_head])


def check_candidates(candidates: Any) -> int | None:
    """How many candidates for each draft, None for all."""
    if candidates is not None and candidates < 1:
        raise InputError(f"candidates is {candidates}; expected 1 or more; leave it out for all.")
    return candidates  # type: ignore[no-any-return]


def check_window(draft_window: Any, draft_sinks: Any, *, block_size: int) -> Window | None:
    """What a drafter reads in place of its layers' own windows: newest tokens, and sink tokens.

    None leaves it its own.
    """
    sinks = DRAFT_SINKS if draft_sinks is None else draft_sinks
    if sinks < 0:
        raise InputError(f"draft_sinks is {sinks}; expected 0 or more.")
    if not draft_window:
        if draft_sinks is not None:
            raise InputError(
                f"draft_sinks is {sinks} and draft_window is {draft_window}; sinks come with a "
                "window of 1 or more: set one, or leave draft_sinks out."
            )
        return None if draft_window is None else ALL_CONTEXT
    if draft_window < block_size:
        raise InputError(
            f"draft_window is {draft_window}; expected {block_size} or more, since a block of "
            "drafts is that long, or 0 for all of the context."
        )
    return Window(draft_window, sinks)
