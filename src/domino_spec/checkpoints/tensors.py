"""Tensors of a checkpoint: their names in each layout, and headers against what the config says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from domino_spec.checkpoints.files import FLOAT_DTYPES, INTEGER_BYTES, TensorHeader, listed
from domino_spec.checkpoints.layouts import SPECULATORS
from domino_spec.checkpoints.packing import DTYPE, PackedTensor, Packing, join_parts
from domino_spec.drafter.config import (
    DominoHeadConfig,
    DrafterConfig,
    Eagle3Config,
    MarkovHeadConfig,
    MedusaConfig,
    ModuleConfig,
)
from domino_spec.errors import CheckpointError

Weight = TensorHeader | PackedTensor

_FC = "fc.weight"
_HEAD_OUTPUTS = ("embed_proj.2.weight", "markov_w2.weight")

OFFSETS = "d2t"
"""Map of a reduced vocabulary: target id minus draft id, for each draft id."""

MEMBERS = "t2d"
"""Which target ids a reduced vocabulary holds; the map says it too."""
LM_HEAD = "lm_head.weight"
"""A copy of the target's rows; engines want it with a reduced vocabulary."""

TARGET_COPIES = frozenset(
    {"embed_tokens.weight", LM_HEAD, "verifier_lm_head.weight", "verifier_norm.weight", MEMBERS}
)
"""What the speculators layout repeats from the target; a drafter uses the target's own."""

_HEAD = "head."
_BACKBONE = "backbone."
_HEAD_MODULES = {
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "markov_w1.": "Markov",
    "markov_w2.": "Markov",
}
SPECULATORS_HEAD = "logits_correction."
_HEAD_CONTAINERS = ("logit_head.", SPECULATORS_HEAD)
_MODEL = "model."


def public_names(stored: Iterable[str]) -> dict[str, str]:
    """Public name of each stored one: a `model.` prefix and a head's container are dropped."""
    names = list(stored)
    prefixed = f"{_MODEL}fc.weight" in names
    return {name: _public_name(name, prefixed) for name in names}


def _public_name(name: str, prefixed: bool) -> str:
    public = name.removeprefix(_MODEL) if prefixed else name
    for container in _HEAD_CONTAINERS:
        public = public.removeprefix(container)
    return public


def is_head(public: str) -> bool:
    """Whether a public name belongs to a head."""
    return head_kind(public) is not None


def head_kind(public: str) -> str | None:
    """The kind of head that a public name belongs to."""
    kinds = [kind for module, kind in _HEAD_MODULES.items() if public.startswith(module)]
    return kinds[0] if kinds else None


def to_state(public: str, config: DrafterConfig | ModuleConfig) -> str:
    """The drafter's own name of a public tensor."""
    if not isinstance(config, DrafterConfig):
        return public
    return (_HEAD if is_head(public) else _BACKBONE) + public


def to_public(state: str) -> str:
    """The public name of one of the drafter's tensors."""
    return state.removeprefix(_HEAD).removeprefix(_BACKBONE)


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Which stored tensor is which of the drafter's; complete and of the right shapes."""

    weights: Mapping[str, Weight]
    """By public name."""
    offsets: TensorHeader | None
    ignored: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The name of a loaded drafter's one type: that of `fc.weight` where it has one."""
        weight = self.weights.get(_FC) or next(iter(self.weights.values()))
        return DTYPE if isinstance(weight, PackedTensor) else FLOAT_DTYPES[weight.dtype]


def plan_tensors(
    headers: Mapping[str, TensorHeader],
    config: DrafterConfig | ModuleConfig,
    *,
    layout: str,
    packing: Packing | None = None,
) -> TensorPlan:
    """Match stored tensors with the drafter's; missing, extra and mis-shaped ones are named."""
    found: dict[str, TensorHeader] = {}
    for stored, public in public_names(headers).items():
        if public in found:
            raise CheckpointError(
                f"tensors {found[public].name!r} and {stored!r} are both {public!r}; expected one "
                "of them. Remove the other."
            )
        found[public] = headers[stored]
    ignored = _target_copies(config, layout) & set(found)
    stored_weights = {p: h for p, h in found.items() if p not in ignored | {OFFSETS}}
    expected = parameter_shapes(config)
    weights: dict[str, Weight] = {**stored_weights}
    if packing is not None:
        weights = join_parts(stored_weights, expected, packing)
    _require_names(weights, expected)
    _require_floats(weights)
    _require_outputs(weights, config)
    _require_shapes(weights, expected)
    offsets = found.get(OFFSETS)
    _require_offsets(offsets, config)
    return TensorPlan(
        weights=weights,
        offsets=offsets,
        ignored=tuple(sorted(found[public].name for public in ignored)),
    )


def parameter_shapes(config: DrafterConfig | ModuleConfig) -> dict[str, tuple[int, ...]]:
    """Public names and shapes of a drafter's parameters, in its own order, without building it."""
    hidden = config.hidden_size
    if isinstance(config, MedusaConfig):
        return {
            f"heads.{head}.blocks.{block}.{name}": shape
            for head in range(config.num_heads)
            for block in range(config.num_layers)
            for name, shape in (("weight", (hidden, hidden)), ("bias", (hidden,)))
        }
    assert isinstance(config, (DrafterConfig, Eagle3Config))
    inner = config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fc = (hidden, len(config.target_layer_ids) * hidden)
    if isinstance(config, Eagle3Config):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "q_proj": (queries, 2 * hidden),
            "k_proj": (keys, 2 * hidden),
            "v_proj": (keys, 2 * hidden),
            "o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        layer_shapes = {f"layer.{name}.weight": shape for name, shape in own.items()}
        return {_FC: fc, **layer_shapes, "norm.weight": (hidden,)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {_FC: fc, "hidden_norm.weight": (hidden,)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    match config.head:
        case DominoHeadConfig(gru_hidden_dim=state, emb_dim=rank):
            shapes |= {
                "prefix_gru.weight_ih_l0": (3 * state, hidden),
                "prefix_gru.weight_hh_l0": (3 * state, state),
                "embed_proj.0.weight": (rank, hidden + state),
                "embed_proj.2.weight": (config.output_vocab_size, rank),
            }
        case MarkovHeadConfig(emb_dim=rank):
            shapes |= {
                "markov_w1.weight": (config.vocab_size, rank),
                "markov_w2.weight": (config.output_vocab_size, rank),
            }
    return shapes


def _target_copies(config: DrafterConfig | ModuleConfig, layout: str) -> frozenset[str]:
    """Stored tensors that are the target's own, and so left aside."""
    if layout == SPECULATORS:
        return TARGET_COPIES
    # As vLLM wants it with a reduced vocabulary.
    return frozenset({LM_HEAD}) if config.draft_vocab_size is not None else frozenset()


def _require_names(weights: Mapping[str, Weight], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [f"{name!r} {list(expected[name])}" for name in expected if name not in weights]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {listed(missing)}; expected {len(expected)} tensors, found "
            f"{len(weights)}. It is incomplete, or config.json belongs to another one."
        )
    extra = [name for name in weights if name not in expected]
    if extra:
        hint = "config.json belongs to another checkpoint, or the drafter is of an unknown kind"
        kinds = sorted({kind for name in extra if (kind := head_kind(name))})
        if kinds:
            hint = (
                f"config.json declares no {' or '.join(kinds)} head (projector_type), yet its "
                "tensors are here"
            )
        described = [f"{weights[name].name!r} {list(weights[name].shape)}" for name in extra]
        raise CheckpointError(
            f"the checkpoint holds {listed(described)}, which the drafter has no use for; {hint}."
        )


def _require_outputs(weights: Mapping[str, Weight], config: DrafterConfig | ModuleConfig) -> None:
    outputs = [weights[name] for name in _HEAD_OUTPUTS if name in weights]
    for output in outputs:
        if output.shape[:1] == (config.output_vocab_size,):
            continue
        raise CheckpointError(
            f"vocabulary mismatch: tensor {output.name!r} is {list(output.shape)}, so the head was "
            f"made for {output.shape[0] if output.shape else 0} tokens, but config.json says "
            f"{config.output_vocab_size}. Correct vocab_size, or state draft_vocab_size and store "
            f"its map {OFFSETS!r} for a reduced vocabulary."
        )


def _require_shapes(weights: Mapping[str, Weight], expected: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{weights[name].name!r} is {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if weights[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"mis-shaped: {listed(wrong)}. config.json and the weights do not belong together."
        )


def _require_floats(weights: Mapping[str, Weight]) -> None:
    wrong = [
        f"{weight.name!r} is {weight.dtype}"
        for weight in weights.values()
        if isinstance(weight, TensorHeader) and weight.dtype not in FLOAT_DTYPES
    ]
    if wrong:
        raise CheckpointError(
            f"{listed(wrong)}; expected one of {', '.join(FLOAT_DTYPES)}. Drafters quantised "
            "by others cannot be loaded: convert them back first."
        )


def _require_offsets(offsets: TensorHeader | None, config: DrafterConfig | ModuleConfig) -> None:
    """Refuse a reduced vocabulary without its map, and a map of another size."""
    if offsets is None:
        if config.draft_vocab_size is not None:
            raise CheckpointError(
                f"config.json says draft_vocab_size = {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens, but the checkpoint lacks tensor {OFFSETS!r} "
                f"[{config.draft_vocab_size}], which maps them to the target's ids."
            )
        return
    expected = (config.output_vocab_size,)
    if offsets.shape != expected or offsets.dtype not in INTEGER_BYTES:
        raise CheckpointError(
            f"tensor {offsets.name!r} is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"{list(expected)} whole numbers: one for each draft token."
        )
