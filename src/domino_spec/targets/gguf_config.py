"""What Transformers leaves out of a GGUF file's configuration: RoPE scaling, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_spec.errors import TargetError
from domino_spec.targets.gguf_metadata import StoredTensor, read_rows, unpacked
from domino_spec.targets.support import FULL_ATTENTION

_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_READ = frozenset(
    {
        "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast",
        "yarn_beta_slow",
    }
)  # fmt: skip
_CHANGES_NOTHING = {"finetuned": (True, False), "yarn_log_multiplier": (0,), "alpha": (0, 1),
                    "yarn_ext_factor": (-1, 1), "yarn_attn_factor": (1,)}  # fmt: skip


def complete_config(
    config: Any, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Set what the file says of positions and windows; refuse by name what has no place."""
    kind = metadata.get("general.architecture")
    text = config.get_text_config()
    _set_rope(text, path, f"{kind}.rope.", metadata, tensors)
    _set_window(text, path, f"{kind}.attention.sliding_window", metadata)


def _set_rope(
    config: Any,
    path: Path,
    prefix: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
) -> None:
    """RoPE parameters as llama.cpp reads the file.

    It divides each frequency by a factor of its own (`rope_freqs`: so Llama 3's scaling is
    stored), which Transformers calls LongRoPE: here with the same factors at every length.
    """
    stated = {
        key.removeprefix(f"{prefix}scaling."): value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}scaling.")
    }
    factor = float(stated.get("factor") or metadata.get(f"{prefix}scale_linear") or 1)
    scaling = str(stated.get("type", "linear"))  # llama.cpp's default
    factors = {
        name: unpacked(read_rows(path, tensors[name]), tensors[name].kind).flatten().tolist()
        for name in ROPE_FACTORS
        if name in tensors
    }
    if set(factors.get(_FACTORS, ())) == {1.0}:
        del factors[_FACTORS]
    if scaling == "none" or (scaling == "linear" and factor == 1):
        scaling, factor = "default", 1.0
    strength = float(stated.get("attn_factor") or 1)
    if scaling == "default" and strength == 1 and not factors:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    own = rope.get(FULL_ATTENTION, rope)  # llama.cpp leaves sliding layers as they are
    if own.get("rope_type") not in (None, "default"):
        return  # Transformers knows the family's scaling
    context = int(config.max_position_embeddings)
    original = int(stated.get("original_context_length") or context)
    unread = [
        f"{prefix}scaling.{name} {value}"
        for name, value in stated.items()
        if name not in _READ and value not in _CHANGES_NOTHING.get(name, ())
    ]
    made: dict[str, Any] = {}
    if unread or "rope_theta" not in own:
        pass
    elif scaling in ("default", "linear") and strength == 1 and factors.keys() == {_FACTORS}:
        each = [factor * value for value in factors[_FACTORS]]
        made = _longrope(each, each, original=context, context=context, strength=1.0)
    elif scaling in ("default", "longrope") and factors.keys() == {_LONG_FACTORS, _SHORT_FACTORS}:
        short, long = factors[_SHORT_FACTORS], factors[_LONG_FACTORS]
        made = _longrope(short, long, original=original, context=context, strength=strength)
    elif scaling == "linear" and strength == 1 and not factors:
        made = {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn" and strength == 1 and not factors:
        made = {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": float(stated.get("yarn_beta_fast", 32)),
            "beta_slow": float(stated.get("yarn_beta_slow", 1)),
        }  # fmt: skip
    if not made:
        found = unread or [f"{prefix}scaling.{name} {value}" for name, value in stated.items()]
        raise TargetError(
            f"{path} scales its rotary positions in a way that is not read "
            f"({', '.join([*found, *factors])}); expected linear or yarn scaling, {_FACTORS}, or "
            f"{_LONG_FACTORS} and {_SHORT_FACTORS}. Use the model's own folder or hub id."
        )
    own.update(made)
    length = "original_max_position_embeddings"
    if length in made and hasattr(config, length):  # Phi3 keeps it there
        setattr(config, length, made[length])


def _longrope(
    short: list[float], long: list[float], *, original: int, context: int, strength: float
) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "factor": max(1.0, context / original), "attention_factor": strength,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def _set_window(config: Any, path: Path, key: str, metadata: Mapping[str, Any]) -> None:
    """The window of a family whose layers all have the same; Transformers reads those of others."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    kind = config.model_type
    if "sliding_window" in GGUF_CONFIG_MAPPING.get(kind.removesuffix("_text"), {}).values():
        return
    window = metadata.get(key) or None
    by_layer = any(hasattr(config, name) for name in ("layer_types", "use_sliding_window"))
    if hasattr(config, "sliding_window") and not by_layer:
        if window is not None or kind == "mistral":  # whose default is that of its first version
            config.sliding_window = window
    elif window is not None and window < config.max_position_embeddings:
        raise TargetError(
            f"{path} has a sliding window of {window} tokens ({key}) and the configuration of "
            f"{kind} cannot say which layers have it; expected full attention over "
            f"all {config.max_position_embeddings} positions. Use the model's own folder or hub id."
        )
