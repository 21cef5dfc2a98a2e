"""Targets with weight-only quantisation: AWQ, GPTQ and FP8 checkpoints, or rounded for a GPU.

A checkpoint's numbers go from its safetensors files into `ScaledWeight`s; the model in half
precision is never built, and none of the packages that made the checkpoint is needed. The model is
Transformers' own class with `QuantizedLinear` in place of `nn.Linear`. Activations stay in their
type, also where the checkpoint would have them rounded too (FP8 with dynamic activations).
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from domino_spec.errors import CheckpointError, TargetError
from domino_spec.quantization import QuantizedWeight, ScaledKind, ScaledWeight
from domino_spec.quantization.modules import QuantizedEmbedding, QuantizedLinear
from domino_spec.quantization.reference import BLOCK
from domino_spec.quantization.scaled import pack_int4, paired
from domino_spec.targets.quantized import FAMILIES, QuantizationNotice, finish_blocks

GPU_FAMILIES = ("granite", *FAMILIES)
FP8_CAPABILITY = (8, 9)
"""The first compute capability whose instructions know e4m3 (Ada); Hopper is 9.0."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight numbers a column is, as AutoAWQ packs them."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a checkpoint's `quantization_config` says of its weights."""

    method: str  # as quant_method has it
    kind: ScaledKind
    bits: int
    block: tuple[int, int] | None = None  # rows and columns that share a scale in an fp8 weight
    stored_zero: int = 0  # what a stored zero point lacks

    @property
    def words(self) -> str:
        """For people."""
        return self.method if self.method == self.kind else f"{self.method} ({self.kind})"


def read_scheme(config: Any, name: str, device: torch.device) -> Scheme | None:
    """How a checkpoint is quantised, if it is one that we read here; else it is Transformers'.

    Of the methods that we read, what we do not is refused by name.
    """
    values = _stated(config)
    read_here = device.type in ("cpu", "cuda") and config.model_type in _families(device)
    if values is None or not read_here:
        return None
    reader = _SCHEMES.get(str(values.get("quant_method")))
    scheme = None if reader is None else reader(values, name)
    if scheme is not None:
        check_fp8(scheme.kind, name, device)
    return scheme


def _stated(config: Any) -> Mapping[str, Any] | None:
    stated = getattr(config, "quantization_config", None)
    if stated is None or isinstance(stated, dict):
        return stated
    values: Mapping[str, Any] = stated.to_dict()
    return values


def _families(device: torch.device) -> tuple[str, ...]:
    return GPU_FAMILIES if device.type == "cuda" else FAMILIES


def refuse_unread_scheme(config: Any, name: str, device: torch.device, *, why: str) -> None:
    """Say which families need no package where Transformers lacks one for a checkpoint."""
    values = _stated(config)
    if values is not None and (method := str(values.get("quant_method"))) in _SCHEMES:
        raise TargetError(
            f"{name} is {method} of a {config.model_type}, for which Transformers wants a package "
            f"that is not there ({why}); expected {', '.join(_families(device))}, which are read "
            f"on {device} without one. Install it, or use the model's own weights."
        )


def check_fp8(kind: str, name: str, device: torch.device) -> None:
    """Refuse fp8 numbers on GPUs that have no instructions for them."""
    if kind != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise TargetError(
            f"the weights of {name} would be fp8 and {device} has compute capability "
            f"{'.'.join(map(str, found))}; expected 8.9 (Ada, Hopper) or more. Use int8 or int4 "
            "(--quantize), or an AWQ or GPTQ checkpoint."
        )


def _awq(values: Mapping[str, Any], name: str) -> Scheme:
    bits, version = values.get("bits"), str(values.get("version", "gemm")).lower()
    if bits != 4:
        raise _unread(name, f"AWQ of {bits} bits", "4 bits")
    if version not in ("gemm", "exllama", "ipex"):  # the others are names of kernels
        raise _unread(name, f"AWQ packed for {version!r}", "version gemm")
    if values.get("zero_point") is False:
        raise _unread(name, "AWQ without zero points", "zero_point true")
    return Scheme(method="awq", kind="int4", bits=4)


def _gptq(values: Mapping[str, Any], name: str) -> Scheme:
    bits = values.get("bits")
    stored = str(values.get("checkpoint_format") or "gptq").lower()
    if bits not in (4, 8):
        raise _unread(name, f"GPTQ of {bits} bits", "4 or 8 bits")
    if values.get("is_marlin_format") or stored not in ("gptq", "gptq_v2"):
        found = "marlin" if values.get("is_marlin_format") else stored
        raise _unread(name, f"GPTQ stored as {found!r}", "checkpoint_format gptq or gptq_v2")
    if values.get("dynamic"):
        raise _unread(name, "GPTQ with settings a module (dynamic)", "one setting for all modules")
    kind: ScaledKind = "int4" if bits == 4 else "int8"
    return Scheme(method="gptq", kind=kind, bits=bits, stored_zero=int(stored == "gptq"))


def _fp8(values: Mapping[str, Any], name: str) -> Scheme:
    if values.get("activation_scheme") == "static":
        raise _static_activations(name)
    block = values.get("weight_block_size")
    return _fp8_scheme("fp8", name, block)


def _fbgemm(_values: Mapping[str, Any], name: str) -> Scheme:
    return _fp8_scheme("fbgemm_fp8", name, None)


def _compressed_tensors(values: Mapping[str, Any], name: str) -> Scheme | None:
    stored = values.get("format")
    if stored not in ("float-quantized", "pack-quantized"):
        return None
    groups = [group for group in (values.get("config_groups") or {}).values() if group]
    if len(groups) != 1:
        raise _unread(name, f"compressed-tensors of {len(groups)} groups", "one for all modules")
    weights = groups[0].get("weights") or {}
    bits = weights.get("num_bits")
    found = bits, weights.get("type"), weights.get("strategy")
    packs = stored == "pack-quantized"
    read = found[:2] in ((4, "int"), (8, "int")) if packs else found[:2] == (8, "float")
    scaled = ("group", "channel") if packs else ("tensor", "channel", "block")
    if not read or found[2] not in scaled:
        words = "{} bits of type {}, scaled by {}".format(*found)
        expected = "4 or 8 whole bits" if packs else "8-bit floats"
        wanted = f"{expected} scaled by {' or '.join(scaled)}"
        raise _unread(name, f"compressed-tensors ({stored}) with {words}", wanted)
    activations = groups[0].get("input_activations") or {}
    if activations and not activations.get("dynamic"):
        raise _static_activations(name)
    if packs:
        assert isinstance(bits, int)
        kind: ScaledKind = "int4" if bits == 4 else "int8"
        return Scheme(method="compressed-tensors", kind=kind, bits=bits)
    block = weights.get("block_structure") if found[2] == "block" else None
    return _fp8_scheme("compressed-tensors", name, block)


_SCHEMES: dict[str, Callable[[Mapping[str, Any], str], Scheme | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
}


def _fp8_scheme(method: str, name: str, block: Any) -> Scheme:
    if block is not None and (len(block) != 2 or int(block[1]) % BLOCK):
        raise _unread(name, f"fp8 in blocks of {block}", f"columns in multiples of {BLOCK}")
    size = None if block is None else (int(block[0]), int(block[1]))
    return Scheme(method=method, kind="fp8", bits=8, block=size)


def _unread(name: str, found: str, expected: str) -> TargetError:
    return TargetError(
        f"{name} is {found}; expected {expected}. Use another quantisation of the model, or its "
        "own weights with quantize int8 or int4 (--quantize)."
    )


def _static_activations(name: str) -> TargetError:
    return _unread(
        name,
        "quantised with static activation scales, by which its activations are to be rounded",
        "dynamic activations, which weight-only products leave in their type",
    )


# Read from a checkpoint -------------------------------------------------------------------------


def load_quantized(
    place: str,
    config: Any,
    scheme: Scheme,
    *,
    name: str,
    options: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
) -> Any:
    """The model of a checkpoint with its numbers as they are, on a GPU or wherever kernels run."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    with suppress(OSError):  # it has none, and the configuration says all
        hub = {key: value for key, value in options.items() if key == "revision"}
        model.generation_config = GenerationConfig.from_pretrained(place, **hub)
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    tensors = _Tensors(place, name, options, device)
    tied = config.get_text_config().tie_word_embeddings
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and not (tied and module is model.lm_head):
            _load_linear(model, path, module, tensors, scheme, dtype)
    for path, parameter in list(model.named_parameters()):
        if parameter.is_meta and not (tied and path == "lm_head.weight"):
            _put(model, path, tensors.parameter(path, parameter.shape, dtype))
    if tied:
        model.tie_weights()
    return model.eval()


def load_for_cpu(
    place: str,
    config: Any,
    scheme: Scheme,
    *,
    name: str,
    options: Mapping[str, Any],
) -> Any:
    """The model of a checkpoint in GGUF's blocks, which CPUs multiply; what is lost is said."""
    model = load_quantized(
        place, config, scheme, name=name, options=options, device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip
    kinds: Counter[str] = Counter()
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear) and isinstance(module.weight, ScaledWeight):
            blocks = _checked(name, path, module.weight.to_blocks)
            kinds[blocks.kind] += 1
            _replace(model, path, QuantizedLinear(blocks, module.bias))
    embedding = model.get_input_embeddings()
    tied = model.lm_head.weight is embedding.weight
    quantize = partial(QuantizedWeight.quantize, kind="Q8_0")
    table = _checked(name, "the embedding", lambda: quantize(embedding.weight))
    if tied:
        model.lm_head = QuantizedLinear(table)
    elif type(model.lm_head) is nn.Linear:
        head = _checked(name, "the lm_head", lambda: quantize(model.lm_head.weight))
        model.lm_head = QuantizedLinear(head, model.lm_head.bias)
    model.set_input_embeddings(QuantizedEmbedding(table))
    how = {
        "Q4_1": "its 4-bit numbers and their scales as they are, scale times zero point rounded to "
        "float16",
        "Q8_0": "8 bits in blocks of 32" if scheme.kind == "fp8" or scheme.bits == 4 else
        "its 8-bit numbers, scales rounded to float16 where they are wider",
    }  # fmt: skip
    said = "; ".join(f"{count} × {kind}: {how[kind]}" for kind, count in sorted(kinds.items()))
    warnings.warn(
        f"{name} is {scheme.words}, which a CPU runs in GGUF's blocks ({said}). Embedding and "
        "lm_head are rounded to Q8_0, and the kernel rounds what products read to 8 bits. On a GPU "
        "the checkpoint runs as it is.",
        QuantizationNotice,
        stacklevel=3,
    )
    return finish_blocks(model, name)


def _load_linear(
    model: Any, path: str, module: nn.Linear, tensors: _Tensors, scheme: Scheme, dtype: torch.dtype
) -> None:
    """A linear layer: quantised where the file has it so, whatever the configuration leaves out."""
    if not tensors.quantised(path):
        return  # a plain parameter, read with the others
    reader = _read_packed if tensors.has(f"{path}.weight_packed") else _READERS[scheme.method]
    weight = _checked(tensors.name, path, partial(reader, tensors, path, scheme))
    if weight.shape != (module.out_features, module.in_features):
        raise TargetError(
            f"{path} of {tensors.name} has the shape {weight.shape} in its files; expected "
            f"{(module.out_features, module.in_features)}, by its configuration. Download it again."
        )
    bias = None
    if module.bias is not None:
        bias = nn.Parameter(tensors.get(f"{path}.bias").to(dtype), requires_grad=False)
    elif tensors.has(f"{path}.bias") and bool(tensors.get(f"{path}.bias").any()):
        raise TargetError(
            f"{path} of {tensors.name} has a bias in its files; expected none, as its model has no "
            "place for it. Check its config.json."
        )
    _replace(model, path, QuantizedLinear(weight, bias))


def _checked(name: str, path: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except CheckpointError as error:
        raise TargetError(f"{path} of {name}: {error}") from error


def _read_awq(tensors: _Tensors, path: str, _scheme: Scheme) -> ScaledWeight:
    places = [4 * place for place in _AWQ_ORDER]
    shifts = torch.tensor(places, dtype=torch.int32, device=tensors.device)

    def numbers(part: str) -> Tensor:  # [.., N / 8] -> [.., N]
        words = tensors.get(f"{path}.{part}")
        return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)

    scales = tensors.halves(f"{path}.scales")  # [groups, N]
    values = numbers("qweight")  # [K, N]
    return ScaledWeight(
        "int4",
        pack_int4(values.T.contiguous()),
        paired(scales, numbers("qzeros")),
        group=len(values) // len(scales),
        pairs=scales.dtype,
    )


def _read_gptq(tensors: _Tensors, path: str, scheme: Scheme) -> ScaledWeight:
    bits, mask = scheme.bits, (1 << scheme.bits) - 1
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=tensors.device)
    words = tensors.get(f"{path}.qweight")  # [K * bits / 32, N]
    values = (words.unsqueeze(1) >> shifts[:, None] & mask).flatten(0, 1)  # [K, N]
    scales = tensors.halves(f"{path}.scales")  # [groups, N]
    zeros = (tensors.get(f"{path}.qzeros").unsqueeze(-1) >> shifts & mask).flatten(-2)
    zeros = zeros + scheme.stored_zero & mask
    group = len(values) // len(scales)
    _require_order(tensors, f"{path}.g_idx", len(values), group)
    return _whole_numbers(scheme.kind, values.T, scales, zeros, group)


def _read_packed(tensors: _Tensors, path: str, scheme: Scheme) -> ScaledWeight:
    """Whole numbers as compressed-tensors packs them: the middle of the range is added to all."""
    bits, mask = scheme.bits, (1 << scheme.bits) - 1
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=tensors.device)
    rows, columns = tensors.get(f"{path}.weight_shape").tolist()
    words = tensors.get(f"{path}.weight_packed")  # [N, K * bits / 32]
    values = (words.unsqueeze(-1) >> shifts & mask).flatten(-2)[:, :columns]  # [N, K]
    scales = tensors.halves(f"{path}.weight_scale").T.contiguous()  # [groups, N]
    zeros = torch.full(scales.shape, 1 << bits - 1, device=tensors.device)
    if tensors.has(f"{path}.weight_zero_point"):
        words = tensors.get(f"{path}.weight_zero_point")  # [N * bits / 32, groups]
        zeros = (words.unsqueeze(1) >> shifts[:, None] & mask).flatten(0, 1)[:rows].T
    group = columns // len(scales)
    _require_order(tensors, f"{path}.weight_g_idx", columns, group)
    return _whole_numbers(scheme.kind, values, scales, zeros, group)


def _require_order(tensors: _Tensors, index: str, columns: int, group: int) -> None:
    """Refuse columns whose groups are not their neighbours'."""
    if not tensors.has(index):
        return
    in_order = torch.arange(columns, device=tensors.device) // group
    if not torch.equal(tensors.get(index).to(in_order.dtype), in_order):
        raise TargetError(
            f"{tensors.name} is quantised in activation order (desc_act, {index}): columns of one "
            "group lie apart; expected groups in order. Use a revision with desc_act false, an AWQ "
            "or FP8 checkpoint, or the model's own weights with quantize int8 or int4 (--quantize)."
        )


def _whole_numbers(
    kind: ScaledKind,
    values: Tensor,  # [N, K], from 0
    scales: Tensor,  # [groups, N]
    zeros: Tensor,  # [groups, N], from 0
    group: int,
) -> ScaledWeight:
    if kind == "int4":
        packed = pack_int4(values.to(torch.uint8).contiguous())
        return ScaledWeight(kind, packed, paired(scales, zeros), group=group, pairs=scales.dtype)
    stored = (values - 128).to(torch.int8)
    if bool((zeros == 128).all()):
        return ScaledWeight(kind, stored, scales.float(), group=group)
    return ScaledWeight(kind, stored, paired(scales, zeros - 128), group=group, pairs=scales.dtype)


def _read_fp8(tensors: _Tensors, path: str, scheme: Scheme) -> ScaledWeight:
    values = tensors.get(f"{path}.weight")
    found = [part for part in ("weight_scale_inv", "weight_scale") if tensors.has(f"{path}.{part}")]
    if values.dtype != torch.float8_e4m3fn or not found:
        has = f"numbers of {values.dtype} and {found[0] if found else 'no weight_scale'}"
        raise CheckpointError(
            f"found {has}, expected torch.float8_e4m3fn and a weight_scale or weight_scale_inv: "
            "use another quantisation of the model"
        )
    if tensors.has(f"{path}.input_scale"):
        raise _static_activations(tensors.name)
    scales = tensors.get(f"{path}.{found[0]}").float()  # each multiplies its numbers
    rows, columns = values.shape
    height, width = scheme.block or (1, columns)
    if scales.shape != (math.ceil(rows / height), math.ceil(columns / width)):
        if scales.numel() in (1, rows):  # per tensor, or per channel
            height, width, scales = 1, columns, scales.reshape(-1, 1).expand(rows, 1)
        elif scheme.block is None:
            raise CheckpointError(
                f"found scales of {list(scales.shape)} for {rows} rows, expected one or one a row "
                "where the configuration states no weight_block_size: check its config.json"
            )
    return ScaledWeight("fp8", values, scales.T.contiguous(), group=width, row_block=height)


_READERS: dict[str, Callable[[_Tensors, str, Scheme], ScaledWeight]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "compressed-tensors": _read_fp8,
}


class _Tensors:
    """A checkpoint's tensors by name, each read when it is asked for."""

    def __init__(
        self, place: str, name: str, options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.name, self.device = name, device
        hub = {key: value for key, value in options.items() if key == "revision"}
        find = partial(cached_file, place, **hub, _raise_exceptions_for_missing_entries=False)
        index, single = find("model.safetensors.index.json"), None
        if index is not None:
            files, _ = get_checkpoint_shard_files(place, index, **hub)
        else:
            single = find("model.safetensors")
            files = [] if single is None else [single]
        if not files:
            raise TargetError(
                f"{name} is quantised and has no safetensors files; expected model.safetensors or "
                "its shards, which alone are read here. Use a revision that has them."
            )
        opened: list[Any] = [safe_open(str(Path(file)), framework="pt") for file in files]
        self._home = {key: each for each in opened for key in each.keys()}  # noqa: SIM118
        if index is not None:
            stated = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            self._require(stated)

    def _require(self, names: Mapping[str, Any]) -> None:
        absent = [name for name in names if name not in self._home]
        if absent:
            raise TargetError(
                f"{self.name} lacks {len(absent)} weights of its model ({', '.join(absent[:5])}); "
                "expected all of them. Download it again or check its config.json."
            )

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self._home

    def quantised(self, path: str) -> bool:
        """Whether they hold a linear layer as numbers of few bits."""
        if self.has(f"{path}.qweight") or self.has(f"{path}.weight_packed"):
            return True
        if not self.has(f"{path}.weight"):
            return False
        kind = self._home[f"{path}.weight"].get_slice(f"{path}.weight").get_dtype()
        return str(kind).startswith(("F8", "I", "U"))

    def get(self, name: str) -> Tensor:
        """On the device."""
        self._require({name: None})
        found: Tensor = self._home[name].get_tensor(name)
        return found.to(self.device)

    def halves(self, name: str) -> Tensor:
        """Scales in half precision, in which zero points stand beside them."""
        found = self.get(name)
        if found.dtype in (torch.float16, torch.bfloat16):
            return found
        if not torch.equal(found.half().to(found.dtype), found):
            raise CheckpointError(
                f"found {name} of {found.dtype} that float16 does not hold, expected half "
                "precision: use another quantisation of the model"
            )
        return found.half()

    def parameter(self, name: str, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        """A plain weight."""
        found = self.get(name)
        if found.shape != shape or not found.is_floating_point():
            raise TargetError(
                f"{name} of {self.name} is {found.dtype} {list(found.shape)} in its files; "
                f"expected plain numbers {list(shape)}. Download it again."
            )
        return nn.Parameter(found.to(dtype), requires_grad=False)


def _replace(model: Any, path: str, made: nn.Module) -> None:
    parent, _, own = path.rpartition(".")
    setattr(model.get_submodule(parent), own, made)


def _put(model: Any, path: str, parameter: nn.Parameter) -> None:
    parent, _, own = path.rpartition(".")
    setattr(model.get_submodule(parent), own, parameter)


# Rounded when loaded ----------------------------------------------------------------------------


@torch.no_grad()
def round_model(model: Any, kind: ScaledKind, name: str, device: torch.device) -> Any:
    """Round a loaded model's layers for a GPU, one weight after the other, and bring it there.

    Embedding and lm_head keep their type.
    """
    decoder = model.get_decoder()
    for path, module in list(decoder.named_modules()):
        if type(module) is nn.Linear:
            weight = module.weight.detach().to(device)
            made = _checked(name, path, partial(ScaledWeight.quantize, weight, kind))
            _replace(decoder, path, QuantizedLinear(made, module.bias))
            module.weight = None  # type: ignore[assignment]  # its memory goes now
    return model.to(device).eval()
