"""The model's own forward and cache: the audit's yardstick shares no code with what it audits."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from domino_spec.quantization.modules import QuantizedLinear
from domino_spec.targets import Target
from domino_spec.targets.cache import growing_cache
from domino_spec.targets.support import (
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    layer_types,
)
from domino_spec.targets.target import evaluating

_HALF = (torch.bfloat16, torch.float16)


def _forward(target: Target, texts: Sequence[Sequence[int]], past: Any, **inputs: Any) -> Any:
    ids = torch.tensor([list(text) for text in texts], device=target.device)
    with evaluating(target.model):
        return target.model(input_ids=ids, past_key_values=past, use_cache=True, **inputs)


class PlainReader:
    """Plain decoding: one sequence, one token a forward, the cache that the model makes itself."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._past: Any = None

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Logits after the last of these tokens, [vocabulary] in float32 on the device."""
        last = {"logits_to_keep": 1} if self._target.takes("logits_to_keep") else {}
        output = _forward(self._target, [tokens], self._past, **last)
        self._past = output.past_key_values
        logits: Tensor = output.logits[0, -1].float()
        return logits


class ShapedReader:
    """Known text through forwards of a wanted shape: equal sequences, blocks, masks, gaps, cuts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._past = growing_cache(target.config)
        self._modules = target.recurrent_modules
        self._before: dict[int, Any] = {}
        """Linear-attention layers of the cache as they were before the last read."""
        self._inputs: dict[int, Tensor] = {}
        """What their modules read then, [1, tokens, hidden] of the first sequence."""
        self._start = 0
        """Where it began."""
        self.length = 0

    def read(self, tokens: Sequence[int], *, batch: int = 1, slots: int | None = None) -> Tensor:
        """Logits [tokens, vocabulary] of the first of `batch` equal sequences, in float32."""
        return self.read_each([tokens] * batch, slots=slots)[0]

    @torch.no_grad()
    def read_each(self, texts: Sequence[Sequence[int]], *, slots: int | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of sequences that have all but these tokens in common.

        With `slots` the cache is as long as that, as if a longer sequence were in the batch, and
        a mask hides what lies between.
        """
        target = self._target
        batch, count = len(texts), len(texts[0])
        self._start = self.length
        # The first sequence's states for each of them, and empty slots after them.
        for layer in self._attention_layers():
            layer.keys = _widened_to(layer.keys, batch, slots or self.length)
            layer.values = _widened_to(layer.values, batch, slots or self.length)
        for index in self._modules:
            layer = self._past.layers[index]
            _repeat_states(layer, 1)
            self._before[index] = copy.deepcopy(layer)
            _repeat_states(layer, batch)
        inputs: dict[str, Any] = {}
        if slots is not None:
            inputs["attention_mask"] = self._mask(batch, count, slots)
            if target.takes("position_ids"):
                places = torch.arange(self.length, self.length + count, device=target.device)
                inputs["position_ids"] = places.expand(batch, -1)
        with ExitStack() as hooks:
            for index, module in self._modules.items():
                hook = module.register_forward_pre_hook(self._keep_input(index), with_kwargs=True)
                hooks.callback(hook.remove)
            logits: Tensor = _forward(target, texts, self._past, **inputs).logits
        for layer in self._attention_layers():
            layer.keys = self._closed(layer.keys, count)
            layer.values = self._closed(layer.values, count)
        self.length += count
        return logits.float()

    def _keep_input(self, index: int) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            self._inputs[index] = states[:1].clone()

        return hook

    @torch.no_grad()
    def cut(self, length: int) -> None:
        """Forget everything after `length` tokens.

        States cannot be cut: those before the last read come back, and the modules read again what
        is left of it, as that forward had rounded it.
        """
        if length >= self.length:
            return
        assert length >= self._start or not self._modules, "states before the last read are gone"
        for index, layer in self._before.items():
            self._past.layers[index] = layer
            if length > self._start:
                read = self._inputs[index][:, : length - self._start]
                with evaluating(self._modules[index]):
                    self._modules[index](read, cache_params=self._past)
        for layer in self._attention_layers():
            layer.keys = layer.keys[:, :, :length]
            layer.values = layer.values[:, :, :length]
        self.length = length

    def _attention_layers(self) -> list[Any]:
        """Layers with keys and values, once there are any."""
        layers = self._past.layers
        return [each for each in layers if isinstance(each, DynamicLayer) and each.is_initialized]

    def _closed(self, states: Tensor, count: int) -> Tensor:
        """Without the empty slots between what was there and what is new."""
        new = states[:, :, states.shape[2] - count :]
        return torch.cat((states[:, :, : self.length], new), dim=2)

    def _mask(self, batch: int, count: int, slots: int) -> Tensor | dict[str, Tensor | None] | None:
        """Who sees whom, spelt out as a batch of sequences of different lengths needs it."""
        target = self._target
        new = torch.arange(self.length, self.length + count, device=target.device)
        old = torch.arange(slots, device=target.device)
        distance = new.unsqueeze(1) - torch.cat((old, new))  # [count, slots + count]
        seen = distance >= 0
        seen[:, self.length : slots] = False
        window = int(getattr(target.config, "sliding_window", None) or 0)
        masks: dict[str, Tensor | None] = {}
        for kind in set(layer_types(target.config)):
            if kind == LINEAR_ATTENTION:
                masks[kind] = None
                continue
            slides = kind == SLIDING_ATTENTION and window
            shown = seen & (distance < window) if slides else seen
            masks[kind] = self._as_taken(shown).expand(batch, 1, -1, -1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_taken(self, seen: Tensor) -> Tensor:
        if self._target.model.config._attn_implementation != "eager":
            return seen
        hidden = torch.finfo(self._target.dtype).min
        return torch.zeros_like(seen, dtype=self._target.dtype).masked_fill(~seen, hidden)


def _widened_to(states: Tensor, batch: int, slots: int) -> Tensor:
    first = states[:1]
    if slots > first.shape[2]:
        empty = first.new_zeros(1, first.shape[1], slots - first.shape[2], first.shape[3])
        first = torch.cat((first, empty), dim=2)
    return first.expand(batch, *first.shape[1:]).contiguous()


def _repeat_states(layer: Any, batch: int) -> None:
    """A linear-attention layer's states of the first sequence, for as many."""
    for states in (layer.conv_states, layer.recurrent_states):
        for number, state in states.items():
            if state is not None:
                states[number] = state[:1].expand(batch, *state.shape[1:]).contiguous()


@torch.no_grad()
def float32_logits(target: Target, ids: Sequence[int]) -> Tensor | None:
    """Logits after the last token with all in float32; None where that cannot be had."""
    try:
        with _widened(target) as wide:
            return PlainReader(target).read(ids) if wide else None
    except torch.OutOfMemoryError:
        return None


@contextmanager
def _widened(target: Target) -> Iterator[bool]:
    """The model in float32 while open; the very same tensors are put back."""
    weights = list(target.model.parameters())
    packed = any(
        tensor.is_meta or (tensor.dim() > 1 and not tensor.is_floating_point())
        for tensor in (*weights, *target.model.buffers())
    )
    if packed or any(hasattr(module, "_hf_hook") for module in target.model.modules()):
        yield False
        return
    narrow = [w for w in weights if w.dtype in _HALF]
    kept = [w.data for w in narrow]
    quantized = [m for m in target.model.modules() if isinstance(m, QuantizedLinear)]
    try:
        for module in quantized:
            module.rounds = False
        for weight in narrow:
            weight.data = weight.data.float()
        yield True
    finally:
        for weight, data in zip(narrow, kept, strict=True):
            weight.data = data
        for module in quantized:
            module.rounds = True
