"""Tiny checkpoints as AutoAWQ, GPTQ's tools and FP8's write them, without any of those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.tokens import small_tokenizer

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FORMATS = (
    "awq", "gptq", "gptq-8", "gptq-v2", "packed", "packed-8",
    "fp8-block", "fp8-tensor", "fbgemm", "compressed",
)  # fmt: skip


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    form: str,
    *,
    group: int = 32,
    block: int = 32,
    leave: tuple[str, ...] = (),
    **changes: Any,
) -> dict[str, Tensor]:
    """Write a model in one of the forms; the values that its linear layers stand for.

    `leave` are parts of the names of layers that stay plain, `changes` of the configuration's.
    """
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    draw = torch.Generator().manual_seed(len(form))
    values = {}
    for name, module in model.model.named_modules():
        if not isinstance(module, nn.Linear) or any(part in name for part in leave):
            continue
        path = f"model.{name}"
        weight = tensors.pop(f"{path}.weight").float()
        made, values[path] = _quantised(weight, form, group=group, block=block, draw=draw)
        tensors |= {f"{path}.{part}": tensor for part, tensor in made.items()}
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = {**_config(form, group=group, block=block), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return values


def _config(form: str, *, group: int, block: int) -> dict[str, Any]:
    if form == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm",
            "zero_point": True,
        }  # fmt: skip
    if form.startswith("gptq"):
        return {
            "quant_method": "gptq", "bits": _bits(form), "group_size": group,
            "desc_act": False, "sym": form == "gptq-8",
            "checkpoint_format": "gptq_v2" if form == "gptq-v2" else "gptq",
        }  # fmt: skip
    if form == "fbgemm":
        return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    if form == "compressed":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        group0 = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": group0}, "ignore": ["lm_head"],
        }  # fmt: skip
    if form.startswith("packed"):
        weights = {
            "num_bits": _bits(form), "type": "int", "strategy": "group", "group_size": group,
            "symmetric": form == "packed-8",
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }  # fmt: skip
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return config | ({"weight_block_size": [block, block]} if form == "fp8-block" else {})


def _bits(form: str) -> int:
    return 8 if form.endswith("-8") else 4


def _quantised(
    weight: Tensor, form: str, *, group: int, block: int, draw: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by the last part of their names, and the values [rows, columns]."""
    rows, columns = weight.shape
    if form.startswith(("awq", "gptq", "packed")):
        bits = _bits(form)
        top = (1 << bits) - 1
        by_group = weight.view(rows, -1, group)
        scales = by_group.abs().amax(-1).mul(2 / top).half().T.contiguous()  # [groups, rows]
        zeros = torch.randint(6, 10, scales.shape, generator=draw)
        if bits == 8:
            zeros = torch.full_like(zeros, 128)
        wide, middle = scales.float().T.unsqueeze(-1), zeros.T.unsqueeze(-1)
        numbers = (by_group / wide + middle).round().clamp(0, top)
        values = ((numbers - middle) * wide).flatten(1)
        whole = numbers.flatten(1).T.to(torch.int64)  # [columns, rows]
        if form == "awq":
            return {
                "qweight": _words(whole, AWQ_ORDER), "qzeros": _words(zeros, AWQ_ORDER),
                "scales": scales,
            }, values  # fmt: skip
        order = tuple(range(32 // bits))
        if form.startswith("packed"):
            made = {
                "weight_packed": _words(whole.T, order, bits), "weight_scale": scales.T,
                "weight_shape": torch.tensor([rows, columns]),
            }  # fmt: skip
            if bits == 4:
                made["weight_zero_point"] = _words(zeros, order, bits).T
            return made, values
        stored = zeros if form == "gptq-v2" else zeros - 1
        return {
            "qweight": _words(whole.T, order, bits).T, "qzeros": _words(stored, order, bits),
            "scales": scales, "g_idx": (torch.arange(columns) // group).int(),
        }, values  # fmt: skip
    if form == "fp8-block":
        scales = torch.rand(-(-rows // block), -(-columns // block), generator=draw) / 100 + 0.004
        spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        name = "weight_scale_inv"
    elif form == "fp8-tensor":
        scales = spread = weight.abs().max() / 448
        name = "weight_scale"
    else:
        scales = spread = weight.abs().amax(1, keepdim=True) / 448
        name = "weight_scale"
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, name: scales}, numbers.float() * spread


def _words(numbers: Tensor, order: tuple[int, ...], bits: int = 4) -> Tensor:
    """[.., N] -> int32 [.., N / per word], number `order[i]` of each word at place i."""
    grouped = numbers.unflatten(-1, (-1, len(order)))
    word = sum(grouped[..., column].long() << (bits * place) for place, column in enumerate(order))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()
