"""What the inference models of all families share: embedding, slots, captured states, logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from domino_spec.drafter.masks import Window
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.cache import PageTable, SlotCache
from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.kernels.linear import Normed, linear, normed
from domino_spec.engine.kernels.packing import Matrix, Table, Weight, packed, page_out
from domino_spec.engine.kernels.pointwise import ACTIVATIONS, SILU, rms_norm
from domino_spec.engine.weights import LayerTensors, adopt_packed, nbytes, own
from domino_spec.quantization import QuantizedWeight
from domino_spec.quantization.modules import QuantizedEmbedding, QuantizedLinear
from domino_spec.quantization.rows import rms_norm as batch_invariant_norm
from domino_spec.targets import Target
from domino_spec.targets.support import (
    SLIDING_ATTENTION,
    layer_types,
    rope_changes,
    rope_parameters,
    static_rope_limit,
)

_DTYPES = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ROPE_UP_TO_A_LENGTH = "longrope"  # which a target's context ends at
_JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of every position, each [capacity, rotated part of a head] in float32."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the forward needs to know besides the weights."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[Window | None, ...]
    """A sliding window a layer, None for full attention."""
    scale: float
    """By which attention multiplies its scores."""
    activation: str = SILU
    """Of the MLP's gate, by Transformers' name."""
    batch_invariant: bool = False
    """Whether a token's attention must not depend on what shares its forward, to the bit."""


def apply_norm(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """Each row of [m, width] by its root mean square, times the weight [width]."""
    norm = batch_invariant_norm if shape.batch_invariant else rms_norm
    return norm(x, weight, shape.eps)


def draft_shape(config: Any, windows: tuple[Window | None, ...]) -> Shape:
    """The shape of a drafter's layers, by its own configuration."""
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        windows=windows,
        scale=config.head_dim**-0.5,
    )


def read_shape(config: Any) -> Shape:
    """The shape of a Llama-like configuration."""
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    size = getattr(config, "sliding_window", None)
    window = None if size is None else Window(size)
    return Shape(
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        eps=float(config.rms_norm_eps),
        windows=tuple(
            window if kind == SLIDING_ATTENTION else None for kind in layer_types(config)
        ),
        scale=head_dim**-0.5,
        activation=read_activation(config),
    )


def read_activation(config: Any) -> str:
    """The name of the MLP's activation, which Gemma keeps under another key."""
    stated = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return SILU if stated is None else str(stated)


class InferenceModel(ABC):
    """A target's weights and its cache in slots. A family says how a layer is composed.

    What a family writes: `reference_class`, `adopt_layer`, `embed` and `run_layer`; where its
    modules are not Llama's, their names and classes; and what it refuses beyond
    `unsupported_reason`.
    """

    reference_class: ClassVar[type[nn.Module]]
    """The class of Transformers that it computes the same as."""
    multimodal_class: ClassVar[type[nn.Module] | None] = None
    """One that reads images too; of tokens alone it computes the same."""
    embedding_class: ClassVar[type[nn.Embedding]] = nn.Embedding
    """Of the target's embedding, where its weights are not quantised."""
    rotary_by_kind: ClassVar[bool] = False
    """Whether sliding and full layers have rotary positions of their own."""
    applies_scales: ClassVar[bool] = False
    """Whether the family multiplies embeddings and logits by its configuration's factors."""
    layers: Sequence[LayerTensors]

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        # Products that round what they read make levels of bits; weight-only ones do not.
        rounds = isinstance(target.lm_head.weight, QuantizedWeight)
        self.shape = replace(self.read_shape(target.config), batch_invariant=rounds)
        self.device, self.dtype = target.device, target.dtype
        self.vocab_size = target.vocab_size
        embedding, lm_head = (
            cast("nn.Embedding", target.embedding),
            cast("nn.Linear", target.lm_head),
        )
        self.embedding, self.lm_head = self.adopt_vocabulary(
            own(embedding.weight), own(lm_head.weight), target.config
        )
        self.lm_head_bias = None if lm_head.bias is None else lm_head.bias.detach()
        self.output: Weight = self.lm_head
        if pack:
            self.output = packed(self.lm_head)
            if isinstance(self.lm_head, Tensor):
                page_out(self.lm_head)
            self.layers = [adopt_packed(layer, self.adopt_layer) for layer in target.layers]
        else:
            self.layers = [self.adopt_layer(layer) for layer in target.layers]
        decoder = target.model.get_decoder()
        self.norm = self.adopt_norm(decoder.norm)
        self._positions: nn.Module = decoder.rotary_emb
        self._config = target.config
        self.rotary = self.rotary_tables(capacity)
        self.cache = self.make_cache(
            layers=len(self.layers),
            slots=slots,
            kv_heads=self.shape.kv_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    # What a family says -------------------------------------------------------------------------

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """What keeps a target of this family off the engine, in words; None if nothing does."""
        config = target.config
        if target.device.type not in _DTYPES:
            return f"it is on {target.device}; the engine runs on CPUs and CUDA"
        if (activation := read_activation(config)) not in ACTIVATIONS:
            return f"its activation is {activation}, not {' or '.join(ACTIVATIONS)}"
        scaled = (target.embedding_scale, target.logit_scale) != (1.0, 1.0)
        if target.logit_softcap is not None or (scaled and not cls.applies_scales):
            return "it scales its embeddings or logits"
        for rope in rope_parameters(config):
            kind = rope.get("rope_type", "default")
            static = kind in _STATIC_ROPE
            if kind == _ROPE_UP_TO_A_LENGTH:
                static = not rope_changes(rope) or target.static_rope_limit is not None
            if not static:
                return f"its rotary positions ({kind}) change with the length"
        size = read_shape(config).head_dim
        if target.device.type == "cuda" and not kernels_take(size):
            return f"its heads are {size} wide; the kernels want a multiple of 16"
        hooked = hooked_modules(target.model)
        if hooked:
            return f"its {hooked[0]} has a hook, which the engine would not call"
        return cls._not_plain_reason(target)

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:  # noqa: ARG003
        """A layer's linear layers, whose weights are taken over."""
        mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return (*_JOINED, "self_attn.o_proj", *mlp)

    @classmethod
    def _not_plain_reason(cls, target: Target) -> str | None:
        modules = {"lm_head": target.lm_head} | {
            f"layer {index} {name}": layer.get_submodule(name)
            for index, layer in enumerate(target.layers)
            for name in cls.projections(layer)
        }
        for name, module in modules.items():
            if type(module) not in (nn.Linear, QuantizedLinear) or hasattr(module, "_hf_hook"):
                return f"its {name} is a {type(module).__name__} (quantised, adapted or off-loaded)"
        for layer in target.layers:
            names = cls.projections(layer)
            biased = {name: layer.get_submodule(name).bias is not None for name in names}
            if any(bias for name, bias in biased.items() if name.startswith("mlp.")):
                return "its MLP has biases"
            if len({biased[name] for name in _JOINED if name in biased}) > 1:
                return "some of its query, key and value projections have biases and some have none"
        if type(target.embedding) not in (cls.embedding_class, QuantizedEmbedding):
            return f"its embedding is a {type(target.embedding).__name__}"
        places = {(p.device, p.dtype) for p in target.model.parameters()}
        if len(places) != 1:
            return f"its weights are of {len(places)} kinds or places; the engine wants one"
        dtype = places.pop()[1]
        if dtype not in _DTYPES[target.device.type]:
            return f"its weights are {dtype}"
        return None

    @staticmethod
    def read_shape(config: Any) -> Shape:
        """Sizes by the configuration."""
        return read_shape(config)

    @staticmethod
    def adopt_vocabulary(
        embedding: Matrix,  # [vocabulary, hidden]
        lm_head: Matrix,
        config: Any,  # noqa: ARG004
    ) -> tuple[Table, Matrix]:
        """Embedding and lm_head as the model and its drafters read them."""
        return embedding, lm_head

    @staticmethod
    @abstractmethod
    def adopt_layer(layer: Any) -> LayerTensors:
        """A layer's weights, taken over from Transformers' module."""

    @staticmethod
    def adopt_norm(norm: Any) -> Tensor:
        """What a norm multiplies normed states by, [hidden]."""
        weight: Tensor = norm.weight
        return own(weight)

    def make_cache(self, **sizes: Any) -> SlotCache:
        """Slots of these sizes."""
        return SlotCache(**sizes)

    def rotary_tables(self, capacity: int) -> list[Rotary]:
        """A layer's rotary positions each; layers may share theirs."""
        # Longer ones would have other frequencies throughout; what lies past that is thrown away.
        capacity = min(capacity, static_rope_limit(self._config) or capacity)
        kinds = layer_types(self._config) if self.rotary_by_kind else [None] * len(self.layers)
        tables = {
            kind: rotary_table(self._positions, capacity, self.device, kind=kind)
            for kind in dict.fromkeys(kinds)
        }
        return [tables[kind] for kind in kinds]

    @abstractmethod
    def embed(self, tokens: Tensor) -> Normed | Tensor:
        """States that go into the first layer, [tokens, hidden]."""

    @abstractmethod
    def run_layer(
        self,
        index: int,
        states: Any,  # what `embed` or the layer before gave
        metadata: AttentionMetadata,
        out: Tensor | None,
    ) -> Normed | Tensor:
        """States that come out of a layer [tokens, hidden], in `out` where that is given."""

    # What all do alike --------------------------------------------------------------------------

    def resize(self, *, slots: int, capacity: int, pages: PageTable | None = None) -> None:
        """Empty slots of another size."""
        self.cache.resize(slots=slots, capacity=capacity, pages=pages)
        self.rotary = self.rotary_tables(capacity)

    def forward(
        self,
        tokens: Tensor,  # [sequences, count]
        metadata: AttentionMetadata,
        capture_layers: Sequence[int] = (),
    ) -> tuple[Normed, Tensor]:
        """States after the last layer [sequences * count, hidden], and the captured ones, joined.

        Captured are the outputs of these layers; `len(layers)` is what the lm_head reads.
        """
        states = self.embed(tokens.flatten())
        captured = torch.empty(
            tokens.numel(), len(capture_layers), self.shape.hidden,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        wanted = {layer: place for place, layer in enumerate(capture_layers)}
        outputs = {layer: captured[:, place] for layer, place in wanted.items()}
        states = self.run_layers(states, metadata, outputs)
        if isinstance(states, Tensor):
            states = normed(states, self.norm, self.shape.eps)
        if (last := wanted.get(len(self.layers))) is not None:
            captured[:, last] = apply_norm(states.rows, self.norm, self.shape)
        return states, captured.flatten(1)

    def run_layers(
        self, states: Any, metadata: AttentionMetadata, outputs: dict[int, Tensor]
    ) -> Normed | Tensor:
        """States after the last layer; those after some layers are also left in `outputs`."""
        for index in range(len(self.layers)):
            states = self.run_layer(index, states, metadata, outputs.get(index))
        found: Normed | Tensor = states
        return found

    def logits(self, states: Normed) -> Tensor:
        """[n, hidden], by the last norm -> [n, vocabulary]."""
        return linear(states, self.output, bias=self.lm_head_bias)

    @property
    def nbytes(self) -> int:
        """What one forward of one token reads of the weights."""
        return sum(weights.nbytes for weights in self.layers) + nbytes([self.lm_head])


def hooked_modules(model: nn.Module) -> list[str]:
    """Names of modules whose forward some hook reads or changes.

    Transformers' own hooks, which collect outputs when it is asked for them, do neither.
    """
    return [name or "model" for name, module in model.named_modules() if _is_hooked(module)]


def _is_hooked(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    own = "transformers.utils.output_capturing"
    # A forward of the object's own, in place of its class's, is a hook by another name.
    return "forward" in vars(module) or any(getattr(h, "__module__", "") != own for h in hooks)


@torch.no_grad()
def rotary_table(
    rotary: nn.Module, capacity: int, device: torch.device, *, kind: str | None = None
) -> Rotary:
    """Cosine and sine of every position, of a kind of layers where kinds differ."""
    positions = torch.arange(capacity, device=device).unsqueeze(0)
    if hasattr(rotary, "mrope_section"):  # one of text, one of rows, one of columns
        positions = positions.expand(3, 1, capacity)
    like = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
    cos, sin = rotary(like, positions, *([] if kind is None else [kind]))
    return cos[0].float().contiguous(), sin[0].float().contiguous()
