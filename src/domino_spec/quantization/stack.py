"""All layers of a model in one call: starting each operation would take as long as a small one."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_size_t, c_void_p
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from domino_spec.quantization.compiled import Kernel, address
from domino_spec.quantization.reference import BLOCK, KINDS
from domino_spec.quantization.rows import KeyRanges
from domino_spec.quantization.weight import QuantizedWeight


class PreNormLayer(Protocol):
    """A layer's weights: norm, attention, norm, gated MLP."""

    @property
    def input_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Any: ...
    @property
    def qkv_bias(self) -> Tensor | None: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def out(self) -> Any: ...
    @property
    def out_bias(self) -> Tensor | None: ...
    @property
    def post_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Any: ...
    @property
    def down(self) -> Any: ...


_VECTORS = ("input_norm", "qkv_bias", "q_norm", "k_norm", "out_bias", "post_norm")
_MATRICES = {"qkv": 3, "out": 1, "gate_up": 2, "down": 1}


class Matrix(Structure):
    """A weight of one kind, as the kernel reads it."""

    _fields_ = [("kind", c_int), ("tiles", c_void_p), ("rows", c_size_t)]


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _VECTORS),
        *((name, Matrix * count) for name, count in _MATRICES.items()),
        *((name, c_void_p) for name in ("keys", "values", "spans", "extras", "captured")),
    ]


class _Stack(Structure):
    _fields_ = [
        *(
            (name, c_size_t)
            for name in (
                "layers", "hidden", "inner", "heads", "kv_heads", "size", "capacity",
                "captured_stride",
            )
        ),
        ("eps", c_float), ("scale", c_float),
        *((name, c_void_p) for name in ("cos", "sin", "places", "x")),
        ("tokens", c_size_t),
    ]  # fmt: skip


class Stack:
    """Llama-like layers over quantised weights, as the compiled kernel walks them."""

    def __init__(
        self, kernel: Kernel, layers: Sequence[PreNormLayer], *, eps: float, scale: float
    ) -> None:
        self._kernel, self._weights = kernel, layers  # whose memory the structures point into
        self._layers = (_Layer * len(layers))()
        for found, weights in zip(self._layers, layers, strict=True):
            for name in _VECTORS:
                vector: Tensor | None = getattr(weights, name)
                assert vector is None or vector.is_contiguous()
                setattr(found, name, address(vector))
            for name, count in _MATRICES.items():
                parts = parts_of(getattr(weights, name))
                assert len(parts) <= count
                for place, part in enumerate(parts):
                    getattr(found, name)[place] = matrix_of(part)
        first = layers[0]
        self._shape = _Stack(
            layers=len(layers), hidden=first.qkv.shape[1], inner=first.down.shape[1],
            eps=eps, scale=scale,
        )  # fmt: skip
        self._blocks = sum(
            parts_of(getattr(first, name))[0].shape[1] * getattr(first, name).shape[0] // BLOCK
            for name in _MATRICES
        )
        self._cache: Any = None
        self._lock = Lock()  # the structures are of one forward at a time

    def run(
        self,
        x: Tensor,  # [tokens, hidden]; its rows are the output in the end
        cache: tuple[Tensor, Tensor],  # [layers, slots, kv heads, capacity, head_dim]
        rotary: tuple[Tensor, Tensor],  # [positions, head_dim]
        places: Tensor,  # [tokens, 3]
        seen: Sequence[KeyRanges],  # by each layer
        captured: dict[int, Tensor],  # layer -> [tokens, hidden], whose rows may lie apart
    ) -> None:
        """Every layer; keys and values are in the cache then."""
        with self._lock:
            self._run(x, cache, rotary, places, seen, captured)

    def _run(
        self,
        x: Tensor,
        cache: tuple[Tensor, Tensor],
        rotary: tuple[Tensor, Tensor],
        places: Tensor,
        seen: Sequence[KeyRanges],
        captured: dict[int, Tensor],
    ) -> None:
        keys, values = cache
        shape = self._shape
        place_of = (keys.data_ptr(), values.data_ptr(), keys.shape)
        if self._cache != place_of:
            self._cache = place_of
            shape.kv_heads, shape.capacity, shape.size = keys.shape[2:]
            width = parts_of(self._weights[0].out)[0].shape[1]
            shape.heads = width // keys.shape[4]
            for place, layer in enumerate(self._layers):
                layer.keys, layer.values = address(keys[place]), address(values[place])
        last = None
        for layer, own in zip(self._layers, seen, strict=True):
            if own is not last:  # most layers see the same
                last, spans = own, address(own.spans, torch.int64)
                extras = address(own.extras, torch.int32)
            layer.spans, layer.extras, layer.captured = spans, extras, None
        for place, rows in captured.items():
            self._layers[place].captured = address(rows)
        shape.cos, shape.sin = map(address, rotary)
        shape.places, shape.x, shape.tokens = address(places, torch.int64), address(x), len(x)
        shape.captured_stride = next((rows.stride(0) for rows in captured.values()), 0)
        self._kernel.forward(self._layers, shape, tokens=len(x), blocks=self._blocks)


def parts_of(weight: Any) -> tuple[QuantizedWeight, ...]:
    """Those of one kind each, of a weight in blocks or of several that are read together."""
    return getattr(weight, "parts", (weight,))


def matrix_of(weight: QuantizedWeight) -> Matrix:
    """Points into the weight's memory."""
    return Matrix(KINDS.index(weight.kind), address(weight.tiles, torch.uint8), weight.shape[0])
