"""Targets whose weights stay in blocks of few bits: a GGUF file's own, or rounded when loaded.

The model is Transformers' own class; only its linear layers and its embedding are others. What
such a target says plainly is what lossless decoding of it must say.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.activations import SiLUActivation
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from domino_spec.errors import Notice, TargetError
from domino_spec.quantization import KINDS, Kind, QuantizedWeight
from domino_spec.quantization.compiled import can_run, unsupported_reason
from domino_spec.quantization.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    quantized_weights,
    unpack_weights,
)
from domino_spec.quantization.reference import BLOCK, FORMATS
from domino_spec.quantization.rows import KeyRanges, RMSNorm, SiLU, attend
from domino_spec.targets.gguf_config import ROPE_FACTORS
from domino_spec.targets.gguf_metadata import gguf_tensors, read_rows, unpacked
from domino_spec.targets.support import EACH_TOKEN

ROUNDED: dict[str, Kind] = {"int8": "Q8_0", "int4": "Q4_1"}
_VOCABULARY_KIND: Kind = "Q8_0"  # every token reads it, and 4 bits cost most there
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
_GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_PERMUTED = "llama"
"""The architecture whose query and key rows llama.cpp stores in another order."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")


class QuantizationNotice(Notice):
    """Weights were rounded that the caller may have expected to be kept."""


class KernelNotice(Notice):
    """Quantised weights are unpacked to float32: no kernel multiplies them as they are."""


def check_quantize(
    quantize: str | None,
    source: str | Path,
    *,
    device: torch.device,
    dtype: Any,
    device_map: Any,
    attn_implementation: str | None,
    is_gguf: bool,
    is_adapter: bool,
) -> None:
    """Refuse by name what cannot be quantised here."""
    if quantize is None:
        return
    if quantize not in ("keep", *ROUNDED, "fp8"):
        raise TargetError(f"quantize is {quantize!r}; expected keep, int8, int4 or fp8, or None.")
    told = f"quantize is {quantize!r} (--quantize {quantize})"
    if device_map is not None or device.type not in ("cpu", "cuda"):
        where = f"device_map is {device_map!r}" if device_map is not None else f"device is {device}"
        raise TargetError(
            f"{told} but {where}; expected one CPU or CUDA GPU, which have kernels for weights of "
            "few bits. Add device='cpu' or 'cuda' (--device) without a device map, or leave "
            "quantize out."
        )
    if device.type == "cuda":
        if quantize == "keep":
            raise TargetError(
                f"{told} but device is {device}; expected a CPU, where alone GGUF's blocks are "
                "multiplied as they are. Add device='cpu' (--device cpu), or use int8, int4 or fp8."
            )
        return
    if quantize == "fp8":
        raise TargetError(
            f"{told} but device is {device}; expected a CUDA GPU, as CPUs have no instructions for "
            "fp8. Use int8 or int4."
        )
    check_blocks_options(told, dtype=dtype, attn_implementation=attn_implementation)
    if quantize == "keep" and not is_gguf:
        what = "an adapter, which is merged into weights that are not" if is_adapter else "no"
        raise TargetError(
            f"{told} but {source} is {what} GGUF file; expected one, whose blocks can be kept. "
            "Use int8 or int4, which round any weights."
        )


def check_blocks_options(told: str, *, dtype: Any, attn_implementation: str | None) -> None:
    """Refuse what a target in GGUF's blocks cannot have."""
    if not callable(dtype) and dtype not in (None, "auto", "float32", torch.float32):
        raise TargetError(
            f"{told} and dtype is {dtype}; expected float32, the type of quantised targets' "
            "states. Leave dtype (--dtype) out."
        )
    if attn_implementation is not None:
        raise TargetError(
            f"{told} and attn_implementation is {attn_implementation!r}; expected none: quantised "
            "targets have an attention of their own. Leave it (--attn-implementation) out."
        )


def check_family(
    config: Any, source: str | Path, quantize: str, *, families: Sequence[str] | None = None
) -> None:
    """Refuse models whose layers are not known to be linear layers and small tensors alone."""
    if getattr(config, "quantization_config", None) is not None:
        raise TargetError(
            f"quantize is {quantize!r} (--quantize {quantize}) and {source} is quantised already; "
            "expected plain weights to round. Leave quantize out to run it as it is."
        )
    if families is None:
        families = _GGUF_FAMILIES if quantize == "keep" else FAMILIES
    if config.model_type not in families:
        raise TargetError(
            f"quantize is {quantize!r} (--quantize {quantize}) and {source} is a "
            f"{config.model_type}; expected {', '.join(families)}. Leave quantize out."
        )


def attend_per_token(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,  # [batch, heads, n, head_dim]
    key: Tensor,  # [batch, kv heads, places, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [batch, 1, n, places], what each token sees; None: causal
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token alone, over the very keys it sees: [batch, n, heads, head_dim].

    So its bits do not depend on what else a forward computes. Quantised weights need that: they
    round what they read, and one bit may move a number to the next level.
    """
    batch, heads, count, size = query.shape
    places = key.shape[2]
    spans: list[tuple[int, int, int]] = []
    extras: list[list[int]] = []
    for row in range(batch):
        for step in range(count):
            if attention_mask is None:
                spans.append((row, 0, places - count + step + 1))
                extras.append([])
            else:
                seen = attention_mask[row % len(attention_mask), 0, step].nonzero()[:, 0].tolist()
                whole = bool(seen) and seen[-1] - seen[0] + 1 == len(seen)
                spans.append((row, seen[0], seen[-1] + 1) if whole else (row, 0, 0))
                extras.append([] if whole else seen)
    mixed = attend(
        query.transpose(1, 2).reshape(-1, heads, size), key, value, KeyRanges.of(spans, extras),
        size**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return mixed.view(batch, count, heads, size), None


AttentionInterface.register(EACH_TOKEN, attend_per_token)
AttentionMaskInterface.register(EACH_TOKEN, sdpa_mask)


# A GGUF file's own blocks -----------------------------------------------------------------------


def multiplied_kinds(path: Path) -> list[str]:
    """The kinds of a GGUF file's matrices where compiled kernels multiply all as they are."""
    metadata, tensors = gguf_tensors(path)
    if metadata.get("general.architecture") not in _GGUF_FAMILIES or not can_run():
        return []
    known = all(name in ROPE_FACTORS or _module_name(name.rpartition(".")[0]) for name in tensors)
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) > 1}
    return sorted(kinds) if known and kinds <= set(KINDS) else []


def load_blocks(path: Path, config: Any) -> Any:
    """The model in a GGUF file, its blocks as they are."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)  # not in the file
    metadata, tensors = gguf_tensors(path)
    permuted = metadata.get("general.architecture") == _PERMUTED
    heads = {
        "attn_q": int(config.num_attention_heads),
        "attn_k": int(config.num_key_value_heads),
    }
    requantized: Counter[str] = Counter()
    for full_name, tensor in tensors.items():
        name, _, suffix = full_name.rpartition(".")
        place = _module_name(name)
        if place is None:
            continue  # such as rope_freqs, which `complete_config` reads
        order = None
        part = name.rpartition(".")[2]
        if permuted and part in heads:
            order = _row_order(tensor.shape[0], heads[part])
        stored = read_rows(path, tensor)
        if suffix == "weight" and len(tensor.shape) == 2:
            _put_matrix(model, place, _blocks(stored, tensor.kind, order, requantized))
        else:
            values = torch.from_numpy(unpacked(stored, tensor.kind)).flatten()
            parent = _submodule(model, place, path)
            own = nn.Parameter(values if order is None else values[order], requires_grad=False)
            setattr(parent, suffix, own)
    if config.tie_word_embeddings:
        model.lm_head = QuantizedLinear(cast("QuantizedWeight", decoder.embed_tokens.weight))
    _require_all(model, path)
    if requantized:
        found = ", ".join(f"{count} × {kind}" for kind, count in sorted(requantized.items()))
        warnings.warn(
            f"{path.name} has tensors in kinds that are not multiplied as they are ({found}); "
            f"expected {', '.join(KINDS)}. They are rounded to Q8_0 here.",
            QuantizationNotice,
            stacklevel=2,
        )
    return finish_blocks(model, path.name)


def _module_name(name: str) -> str | None:
    if name in _NAMES:
        return _NAMES[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}"


def _row_order(rows: int, heads: int) -> Tensor:
    """Undoes the order in which llama.cpp wants rows for its rotary positions."""
    places = torch.arange(rows, device="cpu")
    return places.view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def _blocks(
    stored: Any, kind: str, order: Tensor | None, requantized: Counter[str]
) -> QuantizedWeight:
    if kind in KINDS:
        blocks = torch.from_numpy(stored).view(len(stored), -1, FORMATS[kind].bytes)
        return QuantizedWeight.from_blocks(blocks if order is None else blocks[order], kind)
    requantized[kind] += 1
    values = torch.from_numpy(unpacked(stored, kind))
    return QuantizedWeight.quantize(values if order is None else values[order], "Q8_0")


def _put_matrix(model: nn.Module, name: str, weight: QuantizedWeight) -> None:
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    before = getattr(holder, own)
    expected = tuple(before.weight.shape)
    if tuple(weight.shape) != expected:
        raise TargetError(
            f"{name} has the shape {tuple(weight.shape)} in the file; expected {expected}, by "
            "its metadata. Download it again."
        )
    embeds = isinstance(before, nn.Embedding)
    made = QuantizedEmbedding(weight) if embeds else QuantizedLinear(weight, before.bias)
    setattr(holder, own, made)


def _submodule(model: nn.Module, name: str, path: Path) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise TargetError(
            f"{path} has a tensor for {name}, which its model does not have; download it again, "
            "or leave quantize out."
        ) from error


def _require_all(model: nn.Module, path: Path) -> None:
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        named = ", ".join(absent[:5])
        raise TargetError(
            f"{path} lacks {len(absent)} weights of its model ({named}"
            f"{', ...' if len(absent) > 5 else ''}); expected all of them. Download it again."
        )


def finish_blocks(model: Any, name: str) -> Any:
    """Make all of a model in blocks compute each row alone, or unpack it where no kernel runs."""
    model.config.dtype = torch.float32
    reason = unsupported_reason()
    if reason is None:
        _compute_each_row(model)
        model.set_attn_implementation(EACH_TOKEN)
        return model.eval()
    stored = sum(weight.nbytes for weight in quantized_weights(model).values()) / 1e9
    unpack_weights(model)
    unpacked = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    warnings.warn(
        f"{name} is unpacked to float32, {unpacked:.2f} GB instead of {stored:.2f}, and decodes "
        f"slower: no kernel multiplies its blocks as they are here ({reason}).",
        KernelNotice,
        stacklevel=3,
    )
    return model.eval()


def _compute_each_row(model: nn.Module) -> None:
    """Norms and activations whose rows do not depend on what else is computed."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if hasattr(module, "variance_epsilon"):  # Transformers' norms
                norm: Any = module
                setattr(parent, name, RMSNorm(norm.weight, norm.variance_epsilon))
            elif name == "act_fn" and isinstance(module, nn.SiLU | SiLUActivation):
                setattr(parent, name, SiLU())


# Rounded when loaded ----------------------------------------------------------------------------


@torch.no_grad()
def quantize_model(model: Any, quantize: str, name: str) -> Any:
    """Round a loaded model's matrices to blocks, in place, one after the other."""
    kind = ROUNDED[quantize]
    embedding = model.get_input_embeddings()
    tied = model.lm_head.weight is embedding.weight
    vocabulary = _quantized(embedding, "the embedding", _VOCABULARY_KIND, name)
    for place, module in list(model.get_decoder().named_modules()):
        if type(module) is nn.Linear:
            weight = _quantized(module, place, kind, name)
            parent, _, own = place.rpartition(".")
            bias = module.bias
            setattr(model.get_decoder().get_submodule(parent), own, QuantizedLinear(weight, bias))
    if tied:
        model.lm_head = QuantizedLinear(vocabulary)
    else:
        weight = _quantized(model.lm_head, "the lm_head", _VOCABULARY_KIND, name)
        model.lm_head = QuantizedLinear(weight, model.lm_head.bias)
    model.set_input_embeddings(QuantizedEmbedding(vocabulary))
    return finish_blocks(model.float(), name)


def _quantized(module: nn.Module, place: str, kind: Kind, name: str) -> QuantizedWeight:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.shape[1] % BLOCK:
        raise TargetError(
            f"{place} of {name} has {weight.shape[1]} columns; expected a multiple of {BLOCK}, the "
            "size of a block. Leave quantize (--quantize) out."
        )
    return QuantizedWeight.quantize(weight.detach().float(), kind)
