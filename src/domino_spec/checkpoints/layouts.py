"""config.json of every layout: recognised, read into a DrafterConfig, and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from domino_spec.checkpoints.fields import (
    Fields,
    Overrides,
    Stated,
    boolean,
    default,
    integer,
    integers,
    number,
    required,
    text,
    texts,
)
from domino_spec.checkpoints.packing import PACKED_ARCHITECTURE, Packing, read_section
from domino_spec.checkpoints.packing import SECTION as PACKED_SECTION
from domino_spec.checkpoints.provenance import CONFIG_KEY, Provenance
from domino_spec.drafter.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DominoHeadConfig,
    DrafterConfig,
    HeadConfig,
    MarkovHeadConfig,
    ModuleConfig,
)
from domino_spec.errors import ConfigError

PUBLIC = "public"
SPECULATORS = "speculators"
PACKED = "packed"
PLAIN_VALUES = "plain values"
KIND_FIELD = "drafter"
"""Names the kind of a drafter that is no block drafter; its config.json holds plain values."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything a config.json states."""

    layout: str
    config: DrafterConfig | ModuleConfig
    provenance: Provenance
    packing: Packing | None = None


def read_config(
    values: Mapping[str, Any], overrides: Overrides, *, any_kind: bool = False
) -> Reading:
    """Recognise the layout and read it. An `auto_map` is ignored, never executed."""
    layout = recognise(values)
    if layout == PLAIN_VALUES and not any_kind:
        raise ConfigError(
            f"config.json describes a drafter of kind {values[KIND_FIELD]!r}; expected a "
            "Domino, DFlash or Markov drafter here. It can be trained, compared with them (domino "
            "bench), audited and examined, but not exported, simulated or served."
        )
    provenance = Provenance.from_dict(Fields(values).nested(CONFIG_KEY).values)
    packing: Packing | None = None
    if layout == PACKED or (layout == PLAIN_VALUES and PACKED_SECTION in values):
        packing = read_section(values)
        values = {name: v for name, v in values.items() if name != PACKED_SECTION}
    config: DrafterConfig | ModuleConfig
    if layout == PLAIN_VALUES:
        own = {name: v for name, v in values.items() if name not in (CONFIG_KEY, "dtype")}
        config = ModuleConfig.from_dict(own)
    elif layout == SPECULATORS:
        config = read_speculators(values, overrides)
        if provenance.target_id is None:
            provenance = replace(
                provenance, target_id=text(_verifier(Fields(values))["name_or_path"])
            )
    else:
        plain = {"architectures": [DFLASH_ARCHITECTURE], "model_type": MODEL_TYPE}
        config = read_public({**values, **(plain if packing else {})}, overrides)
    return Reading(layout=layout, config=config, provenance=provenance, packing=packing)


def recognise(values: Mapping[str, Any]) -> str:
    """The name of the layout; an unknown one is refused by its architecture."""
    if values.get(TYPE_FIELD) is not None:
        return SPECULATORS
    architectures = texts(Fields(values)["architectures"]) or ()
    if set(architectures) & set(ARCHITECTURES):
        return PUBLIC
    section = values.get(SECTION)
    described = isinstance(section, Mapping) and section.get("projector_type") is not None
    if DSPARK_ARCHITECTURE in architectures and described:
        return PUBLIC
    if PACKED_ARCHITECTURE in architectures:
        return PACKED
    if values.get(KIND_FIELD) is not None:
        return PLAIN_VALUES
    raise ConfigError(
        f"config.json says architectures = {list(architectures)}; expected one of "
        f"{[*ARCHITECTURES, PACKED_ARCHITECTURE]}, or {TYPE_FIELD!r}. This is "
        "not a DFlash or Domino drafter: point to the drafter's checkpoint, not to the target's."
    )


# The public layout of DFlash and Domino checkpoints -------------------------------------

DFLASH_ARCHITECTURE = "DFlashDraftModel"
DOMINO_ARCHITECTURE = "DominoDraftModel"
MARKOV_ARCHITECTURE = "MarkovDraftModel"
"""Our own: a loader that ignores projector_type must not take the drafter for a plain one."""
ARCHITECTURES = (DFLASH_ARCHITECTURE, DOMINO_ARCHITECTURE, MARKOV_ARCHITECTURE)
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
"""vLLM's name for what its dspark method serves; ours if a head is described too."""

SECTION = "dflash_config"
_DOMINO_PROJECTORS = (DominoHeadConfig.kind, "causal_v5")
_MARKOV_PROJECTORS = (MarkovHeadConfig.kind,)
HEAD_PROJECTORS = (*_DOMINO_PROJECTORS, *_MARKOV_PROJECTORS)
_PLAIN_PROJECTORS = (None, "dflash")
_PROJECTORS_OF = {
    DOMINO_ARCHITECTURE: _DOMINO_PROJECTORS,
    MARKOV_ARCHITECTURE: _MARKOV_PROJECTORS,
}

_READ = {
    "block_size",
    "causal",
    "causal_window",
    "emb_dim",
    "gru_hidden_dim",
    "mask_token_id",
    "num_target_layers",
    "projector_type",
    "pure_draft_prefix_len",
    "shift_label",
    "target_hidden_size",
    "target_layer_ids",
}
# The training loss only: how many blocks a sequence gives and how their errors are weighed.
_TRAINING_ONLY = {
    "num_anchors",
    "loss_decay_gamma",
    "lambda_base_start",
    "lambda_base_decay_ratio",
}
# Switches of serving engines, with the setting that is what this package computes anyway.
_SWITCHES: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "use_swa": False,
}


def read_public(values: Mapping[str, Any], overrides: Overrides) -> DrafterConfig:
    """The drafter that a public config.json describes."""
    top = Fields(values)
    section = top.nested(SECTION)
    _refuse_unknown(section)
    backbone = read_transformer(top)
    require_own_width(
        backbone["hidden_size"], section["target_hidden_size"], top["target_hidden_size"]
    )
    head = _read_public_head(top, section)
    stated_shift = boolean(section["shift_label"], top["shift_label"])
    draft_vocab_size = integer(top["draft_vocab_size"])
    return DrafterConfig(
        **backbone,
        causal_window=_read_causal(section, backbone["layer_types"]),
        draft_vocab_size=None if draft_vocab_size == backbone["vocab_size"] else draft_vocab_size,
        num_target_layers=overrides.target_depth(
            integer(top["num_target_layers"], section["num_target_layers"]),
            label="num_target_layers",
        ),
        target_layer_ids=required(section["target_layer_ids"], integers),
        mask_token_id=required(section["mask_token_id"], integer),
        block_size=required(top["block_size"], integer, section["block_size"]),
        shift_label=overrides.alignment(
            stated_shift, label=section["shift_label"].label, has_head=head is not None
        ),
        head=head,
    )


def read_head(values: Mapping[str, Any]) -> tuple[HeadConfig | None, bool]:
    """Only the head and whether labels are shifted: what an engine with its own backbone needs."""
    top = Fields(values)
    section = top.nested(SECTION)
    head = _read_public_head(top, section)
    stated = boolean(section["shift_label"], top["shift_label"])
    label = section["shift_label"].label
    return head, Overrides().alignment(stated, label=label, has_head=head is not None)


def write_config(config: DrafterConfig | ModuleConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter of any kind: a block drafter's is the public one."""
    if isinstance(config, DrafterConfig):
        return write_public(config, dtype=dtype)
    return {**config.to_dict(), "dtype": dtype}


def write_public(config: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter, in the form that public loaders read."""
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if SLIDING_ATTENTION in config.layer_types:
        # Loaders disagree about the default, so it is always spelled out.
        section["causal"] = config.causal_window
    if config.head or config.shift_label:
        section["shift_label"] = config.shift_label
    if config.head:
        section |= {"projector_type": config.head.kind, **asdict(config.head)}
    is_markov = isinstance(config.head, MarkovHeadConfig)
    values = {
        "architectures": [MARKOV_ARCHITECTURE if is_markov else DFLASH_ARCHITECTURE],
        **write_transformer(config),
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        SECTION: section,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    return values


def _refuse_unknown(section: Fields) -> None:
    known = _READ | _TRAINING_ONLY
    unknown = [
        f"{section[name].label} = {value!r}"
        for name, value in section.values.items()
        if name not in known and value is not None and value != _SWITCHES.get(name, object())
    ]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not supported, and it could change what the drafter computes. "
            f"Known fields are {', '.join(sorted(_READ))}."
        )


def _read_public_head(top: Fields, section: Fields) -> HeadConfig | None:
    stated = section["projector_type"]
    projector = text(stated)
    known = (*_PLAIN_PROJECTORS, *HEAD_PROJECTORS)
    if projector not in known:
        raise ConfigError(
            f"{stated.label} is {projector!r}; expected 'domino' (or the older 'causal_v5') for a "
            "Domino head, 'markov' for a Markov head, or 'dflash' or nothing for a drafter "
            "without one."
        )
    for architecture in top["architectures"].value or ():
        expected = _PROJECTORS_OF.get(architecture, known)
        if projector not in expected:
            raise ConfigError(
                f"architectures is {architecture!r} but {stated.label} is {projector!r}; set it to "
                f"{expected[0]!r} if the checkpoint has such a head, or name the architecture "
                f"{DFLASH_ARCHITECTURE!r} if it has not."
            )
    if projector in _PLAIN_PROJECTORS:
        return None
    rank = required(section["emb_dim"], integer, top["emb_dim"])
    prefix_len = default(integer(section["pure_draft_prefix_len"]), 0)
    gru_hidden_dim = section["gru_hidden_dim"]
    if projector in _MARKOV_PROJECTORS:
        if gru_hidden_dim.value is not None:
            raise ConfigError(
                f"{gru_hidden_dim.label} is {gru_hidden_dim.value!r} but {stated.label} is "
                f"{projector!r}, a head without a GRU; correct the one that is wrong."
            )
        return MarkovHeadConfig(emb_dim=rank, pure_draft_prefix_len=prefix_len)
    return DominoHeadConfig(
        gru_hidden_dim=required(gru_hidden_dim, integer),
        emb_dim=rank,
        pure_draft_prefix_len=prefix_len,
    )


def _read_causal(section: Fields, layer_types: tuple[str, ...]) -> bool:
    # The second name is ours, for engines whose `causal` would cover full layers too.
    causal = default(boolean(section["causal"], section["causal_window"]), False)
    if causal and SLIDING_ATTENTION not in layer_types:
        raise ConfigError(
            f"{section['causal'].label} is true but no layer is {SLIDING_ATTENTION!r}; full layers "
            "see their whole block here. Remove it, or correct layer_types."
        )
    return causal


# The speculators layout ------------------------------------------------------------------

TYPE_FIELD = "speculators_model_type"
_MODEL_TYPES = ("dflash", "domino")

# What that project takes where a Domino config leaves the field out.
_DEFAULT_GRU_HIDDEN_DIM = 1024
_DEFAULT_EMB_DIM = 256
_DEFAULT_PURE_DRAFT_PREFIX_LEN = 1


def read_speculators(values: Mapping[str, Any], overrides: Overrides) -> DrafterConfig:
    """The drafter that a speculators config.json describes."""
    top = Fields(values)
    backbone = read_transformer(top.nested("transformer_layer_config"))
    require_own_width(backbone["hidden_size"], top["target_hidden_size"])
    head = _read_speculators_head(top)
    draft_vocab_size = integer(top["draft_vocab_size"])
    sliding = SLIDING_ATTENTION in backbone["layer_types"]
    return DrafterConfig(
        **backbone,
        causal_window=sliding and not boolean(top["sliding_window_non_causal"]),
        draft_vocab_size=None if draft_vocab_size == backbone["vocab_size"] else draft_vocab_size,
        num_target_layers=overrides.target_depth(
            integer(top["num_target_layers"], _verifier(top)["num_hidden_layers"]),
            label="num_target_layers",
        ),
        target_layer_ids=_read_layer_ids(top),
        mask_token_id=required(top["mask_token_id"], integer),
        block_size=required(top["block_size"], integer),
        shift_label=overrides.alignment(
            boolean(top["sample_from_anchor"], top["shift_label"]),
            label="sample_from_anchor",
            has_head=head is not None,
        ),
        head=head,
    )


def _verifier(top: Fields) -> Fields:
    return top.nested("speculators_config").nested("verifier")


def _read_speculators_head(top: Fields) -> HeadConfig | None:
    model_type, projector = top[TYPE_FIELD].value, text(top["projector_type"])
    if model_type not in _MODEL_TYPES:
        raise ConfigError(
            f"{TYPE_FIELD} is {model_type!r}; only {' and '.join(map(repr, _MODEL_TYPES))} "
            "checkpoints can be loaded."
        )
    if projector not in (None, *_MODEL_TYPES) or (model_type, projector) == ("domino", "dflash"):
        raise ConfigError(
            f"projector_type is {projector!r} where {TYPE_FIELD} is {model_type!r}; expected "
            "'domino' for a head, or nothing."
        )
    if "domino" not in (model_type, projector):
        return None
    return DominoHeadConfig(
        gru_hidden_dim=default(integer(top["gru_hidden_dim"]), _DEFAULT_GRU_HIDDEN_DIM),
        emb_dim=default(
            integer(top["logits_correction_emb_dim"], top["emb_dim"]), _DEFAULT_EMB_DIM
        ),
        pure_draft_prefix_len=default(
            integer(top["pure_draft_prefix_len"]), _DEFAULT_PURE_DRAFT_PREFIX_LEN
        ),
    )


def _read_layer_ids(top: Fields) -> tuple[int, ...]:
    stated = top["aux_hidden_state_layer_ids"]
    ids = required(stated, integers)
    if min(ids, default=1) < 1:
        raise ConfigError(
            f"{stated.label} is {list(ids)}; they count from 1 (k is the output of layer k-1), and "
            "the embedding output, 0, is not a layer that can be captured."
        )
    return tuple(i - 1 for i in ids)


# The Qwen3 fields, which both have -------------------------------------------------------

MODEL_TYPE = "qwen3"
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
"""As Transformers calls them; a test compares."""

_NEUTRAL_LAYER: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Fields that would change the arithmetic, with the one value that does not."""


def read_transformer(fields: Fields) -> dict[str, Any]:
    """Backbone fields of `DrafterConfig`; whatever would change the arithmetic is refused."""
    _require_qwen3(fields)
    hidden_size = required(fields["hidden_size"], integer)
    num_heads = required(fields["num_attention_heads"], integer)
    num_layers = required(fields["num_hidden_layers"], integer)
    layer_types, sliding_window = _read_layer_types(fields, num_layers)
    values = {
        "hidden_size": hidden_size,
        "intermediate_size": required(fields["intermediate_size"], integer),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": default(integer(fields["num_key_value_heads"]), num_heads),
        "head_dim": default(integer(fields["head_dim"]), hidden_size // max(num_heads, 1)),
        "rms_norm_eps": number(fields["rms_norm_eps"]),
        "max_position_embeddings": integer(fields["max_position_embeddings"]),
        "rope_parameters": _read_rope(fields),
        "layer_types": layer_types,
        "sliding_window": sliding_window,
        "vocab_size": required(fields["vocab_size"], integer),
    }
    return {name: value for name, value in values.items() if value is not None}


def write_transformer(config: DrafterConfig) -> dict[str, Any]:
    """The same fields under their Qwen3 names."""
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    sliding = SLIDING_ATTENTION in config.layer_types
    return {
        "model_type": MODEL_TYPE,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": config.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def require_own_width(hidden_size: int, *places: Stated) -> None:
    """Refuse a drafter whose width differs from its target's: nothing here projects between."""
    target = integer(*places)
    if target not in (None, hidden_size):
        raise ConfigError(
            f"{places[0].label} is {target} but hidden_size is {hidden_size}; a drafter of another "
            "width than its target is not supported."
        )


def _require_qwen3(fields: Fields) -> None:
    model_type = text(fields["model_type"])
    if model_type not in (None, MODEL_TYPE):
        raise ConfigError(
            f"{fields['model_type'].label} is {model_type!r}; only {MODEL_TYPE!r} draft layers are "
            "supported."
        )
    for name, neutral in _NEUTRAL_LAYER.items():
        stated = fields[name]
        if stated.value is not None and stated.value != neutral:
            raise ConfigError(
                f"{stated.label} is {stated.value!r}; only {neutral!r} is supported, since any "
                "other value changes what the drafter computes."
            )


def _read_layer_types(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    window = integer(fields["sliding_window"])
    enabled = boolean(fields["use_sliding_window"])
    layer_types = texts(fields["layer_types"])
    if layer_types is None:
        # Qwen3's own rule where the layers are not spelled out.
        full = num_layers
        if enabled and window is not None:
            full = min(default(integer(fields["max_window_layers"]), 28), num_layers)
        layer_types = (FULL_ATTENTION,) * full + (SLIDING_ATTENTION,) * (num_layers - full)
    if SLIDING_ATTENTION not in layer_types:
        return layer_types, None
    if enabled is False:
        raise ConfigError(
            f"{fields['use_sliding_window'].label} is false but {fields['layer_types'].label} has "
            "sliding layers; correct the one that is wrong."
        )
    return layer_types, window


def _read_rope(fields: Fields) -> dict[str, Any]:
    parameters, scaling = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    for name in (FULL_ATTENTION, SLIDING_ATTENTION):
        if name in parameters.values:
            raise ConfigError(
                f"{parameters[name].label} gives positions of their own to one kind of layer; "
                "only one set of rope parameters for all layers is supported."
            )
    theta = required(fields["rope_theta"], number, parameters["rope_theta"], scaling["rope_theta"])
    rope_type = text(
        parameters["rope_type"], parameters["type"], scaling["rope_type"], scaling["type"]
    )
    rope_type = rope_type or "default"
    if rope_type not in ROPE_TYPES:
        known = ", ".join(sorted(ROPE_TYPES))
        raise ConfigError(f"rope_type is {rope_type!r}; known types are {known}.")
    partial = number(parameters["partial_rotary_factor"], scaling["partial_rotary_factor"])
    if partial not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor is {partial}; only 1.0 is supported: the whole head is rotated."
        )
    rest = {**scaling.values, **parameters.values}
    rest.pop("type", None)
    return {**rest, "rope_type": rope_type, "rope_theta": theta}
