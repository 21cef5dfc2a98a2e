"""Which models can be targets: everything else is refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from domino_spec.errors import TargetError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LINEAR_ATTENTION = "linear_attention"
EACH_TOKEN = "domino_each_token"
"""The attention implementation of quantised targets, as Transformers knows it."""

IMAGE_FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl")
"""The `model_type`s of vision-language targets whose images are read."""

_QUANTISATIONS_THAT_WORK = frozenset(
    {
        # Weights only, or activations scaled per token: a token's result does not depend on
        # which other tokens share its forward, so a verified block equals single steps.
        "aqlm", "auto-round", "awq", "bitsandbytes_4bit", "compressed-tensors", "eetq",
        "fbgemm_fp8", "fp8", "gguf", "gptq", "higgs", "hqq", "mxfp4", "quanto", "spqr",
        "torchao", "vptq",
    }
)  # fmt: skip
_DRAFTERS = frozenset(
    {
        "DFlashDraftModel",
        "DFlashSpeculator",
        "DominoDraftModel",
        "DominoPackedDraftModel",
        "DominoSpeculator",
        "MarkovDraftModel",
    }
)
_QUANTISATIONS_THAT_DO_NOT = {
    "bitsandbytes_8bit": "LLM.int8() picks its outlier columns from all tokens of a forward, so a "
    "verified block would not equal single steps; load the target in 4 bits or in bfloat16",
}


def layer_types(config: Any) -> list[str]:
    """Attention kind per layer, inferred the way Transformers builds its own cache."""
    stated = getattr(config, "layer_types", None)
    if stated is not None:
        return list(stated)
    if getattr(config, "sliding_window", None):
        kind = SLIDING_ATTENTION
    elif getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    else:
        kind = FULL_ATTENTION
    return [kind] * int(config.num_hidden_layers)


def linear_layers(config: Any) -> list[int]:
    """Indices of the layers that keep a recurrent state instead of keys and values."""
    kinds = enumerate(layer_types(config))
    return [index for index, kind in kinds if kind == LINEAR_ATTENTION]


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """What is said of rotary positions: once for all layers, or by kind of layer."""
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(stated, dict):
        return []
    return [stated, *(value for value in stated.values() if isinstance(value, dict))]


def rope_changes(rope: dict[str, Any]) -> bool:
    """Whether frequencies depend on the length: dynamic NTK, LongRoPE with two sets of factors."""
    rope_type = str(rope.get("rope_type", rope.get("type")))
    if rope_type == "longrope":
        return bool(rope.get("short_factor") != rope.get("long_factor"))
    return "dynamic" in rope_type


def static_rope_limit(config: Any) -> int | None:
    """Sequence length up to which RoPE frequencies are constant; None if they always are.

    LongRoPE switches all frequencies past the original context, and dynamic NTK recomputes them
    for every length past the trained one. A forward takes them from its own longest sequence, so
    a block past the limit does not equal one-token steps, and neither do sequences of a batch.
    """
    original = getattr(config, "original_max_position_embeddings", None)
    trained = getattr(config, "max_position_embeddings", None)
    limits = []
    for kind in rope_parameters(config):
        if not rope_changes(kind):
            continue
        limits.append(kind.get("original_max_position_embeddings") or original)
        if "dynamic" in str(kind.get("rope_type", kind.get("type"))):
            limits.append(trained)
    return min((int(limit) for limit in limits if limit), default=None)


def own_window(config: Any) -> str | None:
    """A window that the model applies by itself, by cache slot, and that no mask of ours meets."""
    for name, value in config.to_dict().items():
        counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
        ours = "sliding_window" in name or "layers" in name
        if counts and "window" in name and not ours:
            return f"{name}={value}"
    return None


def image_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why prompts for this model hold no images, in words; None if they may."""
    kind = str(model.config.model_type)
    if kind in IMAGE_FAMILIES and hasattr(model.base_model, "get_image_features"):
        return None
    families = ", ".join(IMAGE_FAMILIES)
    return f"it is a {type(model).__name__}; images are read by {families}"


def unwrap_adapters(model: Any) -> PreTrainedModel:
    """The Transformers model inside a PEFT wrapper; its active adapters stay active."""
    peft_configs = getattr(model, "peft_config", None) or {}
    for name, adapter in peft_configs.items():
        kind = str(getattr(adapter, "peft_type", type(adapter).__name__)).split(".")[-1]
        if getattr(adapter, "is_prompt_learning", False):
            raise TargetError(
                f"the adapter {name!r} is {kind}: it puts virtual tokens before the prompt, which "
                "shifts every position the drafter relies on. Merge-able adapters such as LoRA "
                "work; use one of those."
            )
        if getattr(adapter, "alora_invocation_tokens", None):
            raise TargetError(
                f"the adapter {name!r} is an activated LoRA that switches on inside the sequence; "
                "a verified block cannot follow the switch. Use a plain LoRA."
            )
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            f"a target must be a Transformers model; found {type(model).__name__}. Load it with "
            "AutoModelForCausalLM or pass its folder or hub id."
        )
    return model


def check_config(config: Any, name: str) -> None:
    """Refuse by configuration alone, before weights are loaded."""
    drafts = _DRAFTERS & set(getattr(config, "architectures", None) or ())
    if drafts:
        raise TargetError(
            f"{name} is a drafter ({', '.join(drafts)}), not a target; give it as the draft "
            "(--draft) of the model it was trained for."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"{name} is an encoder-decoder ({config.model_type}); Domino drafts for decoder-only "
            "models."
        )
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", None) is None:
        raise TargetError(
            f"{name} ({config.model_type}) does not say num_hidden_layers, so that its hidden "
            "states cannot be captured."
        )
    known = {FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION}
    unknown = sorted(set(layer_types(text)) - known)
    if unknown:
        raise TargetError(
            f"{name} ({config.model_type}) has layers of type {', '.join(unknown)}; their state "
            "cannot be rolled back exactly after a rejected draft. Only full, sliding-window and "
            "linear attention can be a target."
        )
    _check_quantisation(getattr(config, "quantization_config", None), name)


def check_model(model: PreTrainedModel, name: str) -> None:
    """Refuse what only the model's class tells."""
    stateful = getattr(model, "_is_stateful", False)
    if stateful and not linear_layers(model.config.get_text_config()):
        raise TargetError(
            f"{name} ({type(model).__name__}) keeps a running state (state-space or recurrent "
            "layers) that cannot be rolled back exactly after a rejected draft."
        )
    if model.get_output_embeddings() is None:
        raise TargetError(
            f"{name} ({type(model).__name__}) has no language-model head; load it with "
            "AutoModelForCausalLM."
        )


def _check_quantisation(quantisation: Any, name: str) -> None:
    if quantisation is None:
        return
    read = quantisation.get if isinstance(quantisation, dict) else vars(quantisation).get
    method = str(getattr(read("quant_method"), "value", read("quant_method")))
    if method == "bitsandbytes":
        loads_8bit = read("load_in_8bit") or read("_load_in_8bit")
        method = "bitsandbytes_8bit" if loads_8bit else "bitsandbytes_4bit"
    if method in _QUANTISATIONS_THAT_DO_NOT:
        raise TargetError(
            f"{name} is quantised with {method}: {_QUANTISATIONS_THAT_DO_NOT[method]}."
        )
    if _scales_whole_forwards(method, read):
        raise TargetError(
            f"{name} is quantised with {method}, scaling activations over a whole forward: a "
            "verified block would not equal single steps. Use a per-token or static scheme."
        )
    if method not in _QUANTISATIONS_THAT_WORK:
        known = ", ".join(sorted(_QUANTISATIONS_THAT_WORK))
        raise TargetError(
            f"{name} is quantised with {method!r}, which is not known to give a block the same "
            f"results as single steps. Known to work: {known}."
        )


def _scales_whole_forwards(method: str, read: Callable[[str], Any]) -> bool:
    """Whether activations are scaled by a maximum taken over all tokens of a forward."""
    if method == "compressed-tensors":
        groups = (read("config_groups") or {}).values()
        schemes = [g.get("input_activations") or {} for g in groups if isinstance(g, dict)]
        return any(s.get("dynamic") and s.get("strategy") == "tensor" for s in schemes)
    if method == "torchao":
        scheme = f"{read('quant_type')}".lower()
        return "dynamic" in scheme and "pertensor" in scheme
    return False
