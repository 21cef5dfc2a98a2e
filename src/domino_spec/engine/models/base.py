"""What the inference models of all families share: embedding, slots, captured states, logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.cache import SlotCache
from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.kernels.linear import Normed, linear, normed
from domino_spec.engine.kernels.packing import Table, Weight, packed, page_out
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.weights import LayerTensors, adopt_packed, nbytes, own
from domino_spec.quantization import QuantizedWeight
from domino_spec.quantization.modules import QuantizedEmbedding, QuantizedLinear
from domino_spec.targets import Target
from domino_spec.targets.support import SLIDING_ATTENTION, layer_types

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
    scale: float
    """By which attention multiplies its scores."""
    each_alone: bool = False
    """Whether a token's attention must not depend on what shares its forward, to the bit."""


def draft_shape(config: Any, windows: tuple[int | None, ...]) -> Shape:
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
    window = getattr(config, "sliding_window", None)
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
    )


class InferenceModel(ABC):
    """A target's weights and its cache in slots. A family says how a layer is composed.

    What a family writes: `reference_class`, `adopt_layer`, `embed` and `run_layer`, and what it
    refuses beyond `unsupported_reason`.
    """

    reference_class: ClassVar[type[nn.Module]]
    """The class of Transformers that it computes the same as."""
    applies_scales: ClassVar[bool] = False
    """Whether the family multiplies embeddings and logits by its configuration's factors."""
    layers: Sequence[LayerTensors]

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        # Products that round what they read make levels of bits; weight-only ones do not.
        rounds = isinstance(target.lm_head.weight, QuantizedWeight)
        self.shape = replace(self.read_shape(target.config), each_alone=rounds)
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
        self.norm = decoder.norm.weight.detach()
        self._positions: nn.Module = decoder.rotary_emb
        self.rotary = rotary_table(self._positions, capacity, self.device)
        self.cache = SlotCache(
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
        if getattr(config, "hidden_act", "silu") != "silu":
            return f"its activation is {config.hidden_act}, not silu"
        scaled = (target.embedding_scale, target.logit_scale) != (1.0, 1.0)
        if target.logit_softcap is not None or (scaled and not cls.applies_scales):
            return "it scales its embeddings or logits"
        rope = getattr(config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        if kind not in _STATIC_ROPE:
            return f"its rotary positions ({kind}) change with the length"
        size = read_shape(config).head_dim
        if target.device.type == "cuda" and not kernels_take(size):
            return f"its heads are {size} wide; the kernels want a power of two, 16 or more"
        hooked = hooked_modules(target.model)
        if hooked:
            return f"its {hooked[0]} has a hook, which the engine would not call"
        return _not_plain_reason(target)

    @staticmethod
    def read_shape(config: Any) -> Shape:
        """Sizes by the configuration."""
        return read_shape(config)

    @staticmethod
    def adopt_vocabulary(
        embedding: Table,  # [vocabulary, hidden]
        lm_head: Table,
        config: Any,  # noqa: ARG004
    ) -> tuple[Table, Table]:
        """Embedding and lm_head as the model and its drafters read them."""
        return embedding, lm_head

    @staticmethod
    @abstractmethod
    def adopt_layer(layer: Any) -> LayerTensors:
        """A layer's weights, taken over from Transformers' module."""

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

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""
        self.cache.resize(slots=slots, capacity=capacity)
        self.rotary = rotary_table(self._positions, capacity, self.device)

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
        for index in range(len(self.layers)):
            out = captured[:, wanted[index]] if index in wanted else None
            states = self.run_layer(index, states, metadata, out)
        if isinstance(states, Tensor):
            states = normed(states, self.norm, self.shape.eps)
        if (last := wanted.get(len(self.layers))) is not None:
            captured[:, last] = rms_norm(states.rows, self.norm, self.shape.eps)
        return states, captured.flatten(1)

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


def _not_plain_reason(target: Target) -> str | None:
    modules = {"lm_head": target.lm_head} | {
        f"layer {index} {name}": layer.get_submodule(name)
        for index, layer in enumerate(target.layers)
        for name in _PROJECTIONS
    }
    for name, module in modules.items():
        if type(module) not in (nn.Linear, QuantizedLinear) or hasattr(module, "_hf_hook"):
            return f"its {name} is a {type(module).__name__} (quantised, adapted or off-loaded)"
    for layer in target.layers:
        plain = [layer.get_submodule(name).bias is None for name in _PROJECTIONS]
        if not all(plain[4:]):
            return "its MLP has biases"
        if len(set(plain[:3])) != 1:
            return "some of its query, key and value projections have biases and some have none"
    if type(target.embedding) not in (nn.Embedding, QuantizedEmbedding):
        return f"its embedding is a {type(target.embedding).__name__}"
    places = {(p.device, p.dtype) for p in target.model.parameters()}
    if len(places) != 1:
        return f"its weights are of {len(places)} kinds or places; the engine wants one"
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
