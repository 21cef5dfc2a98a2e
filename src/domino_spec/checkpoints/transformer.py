"""The Qwen3 fields of a config.json: into the backbone's part of a DrafterConfig and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_spec.checkpoints.fields import (
    Fields,
    Stated,
    boolean,
    default,
    integer,
    number,
    required,
    text,
    texts,
)
from domino_spec.drafter.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterConfig
from domino_spec.errors import ConfigError

MODEL_TYPE = "qwen3"
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
"""As Transformers calls them; a test compares."""

_NEUTRAL: Mapping[str, Any] = {
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
    for name, neutral in _NEUTRAL.items():
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
