"""Rollback of linear-attention layers: states saved before a forward, restored and replayed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from domino_spec.errors import TargetError

_STATES = ("conv_states", "recurrent_states")


def find_recurrent_modules(
    layers: nn.ModuleList, indices: Sequence[int], name: str
) -> dict[int, nn.Module]:
    """The module of each linear-attention layer that reads and writes the layer's states."""
    found = {}
    for index in indices:
        takers = (
            module
            for module in layers[index].modules()
            if "cache_params" in inspect.signature(module.forward).parameters
        )
        module = next(takers, None)
        if module is None:
            raise TargetError(
                f"{name}: layer {index} ({type(layers[index]).__name__}) is linear attention but "
                "holds no module that takes `cache_params`, so its state cannot be rolled back "
                "exactly after a rejected draft."
            )
        found[index] = module
    return found


class RecurrentStates:
    """Convolution and recurrent states of a cache: each is one sum over all tokens, so none is cut.

    Before a forward they are saved, and during it each module's input is recorded. Sequences that
    commit only a part get the saved states back, and the modules read that part of the recorded
    input once more: in the same kernels as the forward, without another sequence's tokens or
    padding, and without the rest of the model.
    """

    def __init__(self, past: Cache, modules: Mapping[int, nn.Module]) -> None:
        self._past = past
        self._modules = modules
        self._count = 0  # tokens of each sequence in the last forward
        self._saved: dict[int, Any] = {}
        self._inputs: dict[int, Tensor] = {}  # [batch, count, hidden]

    @contextmanager
    def forwarding(self, count: int, *, rollback: bool) -> Iterator[None]:
        """A forward of so many tokens while open, which `rollback` makes ready for."""
        self._forget()
        self._count = count
        handles = []
        if rollback:
            self._saved = {index: _copied(self._past.layers[index]) for index in self._modules}
            handles = [
                module.register_forward_pre_hook(self._keep_input(index), with_kwargs=True)
                for index, module in self._modules.items()
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep_input(self, index: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _forget(self) -> None:
        self._saved, self._inputs = {}, {}

    @torch.no_grad()
    def commit(self, counts: Sequence[int]) -> None:
        """States after the first `counts[i]` tokens that the last forward appended."""
        for count in sorted(set(counts) - {self._count}):
            assert self._saved, "a forward without `rollback` is committed whole"
            self._replay([row for row, own in enumerate(counts) if own == count], count)
        self._forget()

    def _replay(self, rows: Sequence[int], count: int) -> None:
        """Restore these sequences' states and read their first `count` tokens again."""
        layers = self._past.layers
        for index, module in self._modules.items():
            layer, restored = layers[index], _copied(self._saved[index], rows)
            if count:
                layers[index] = restored
                try:
                    module(self._inputs[index][rows, :count], cache_params=self._past)
                finally:
                    layers[index] = layer
            for name in _STATES:
                for number, states in getattr(layer, name).items():
                    if states is not None:
                        own = getattr(restored, name)[number]
                        states[rows] = 0 if own is None else own  # none before the first token

    def select(self, kept: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        for index in self._modules:
            self._past.layers[index] = _copied(self._past.layers[index], kept)


def _copied(layer: Any, rows: Sequence[int] | None = None) -> Any:
    """A layer of the cache with states of its own, of all sequences or these."""
    other = copy.copy(layer)
    for name, values in vars(layer).items():
        if isinstance(values, dict):  # a value for each state that the layer has
            setattr(other, name, dict(values))
    for name in _STATES:
        for number, states in getattr(layer, name).items():
            if states is not None:
                own = states.clone() if rows is None else states[list(rows)]
                getattr(other, name)[number] = own
    return other
