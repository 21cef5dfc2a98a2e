"""What makes a step fast on a GPU: compiled layers, FlexAttention, a compiled loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.drafter import DraftModel, DraftModule
from domino_spec.drafter.backbone import DraftLayer
from domino_spec.targets import Target
from domino_spec.training.loss import ChunkGradients, chunk_gradients

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Acceleration:
    """Compiled forms of a drafter's and a target's layers, for the one shape that training has.

    Layers of one kind share what is compiled. Hooks stay outside, so hidden states are still
    captured. The forms are in place only while `active`; decoding in between, with its many
    shapes, runs `suspended`.
    """

    def __init__(self, drafter: DraftModule, target: Target) -> None:
        self._drafter = drafter
        self._forms: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        if isinstance(drafter, DraftModel):
            for layer in drafter.backbone.layers:
                assert isinstance(layer, DraftLayer)
                self._add(layer, "forward", _learning)
                self._add(layer.self_attn, "keys_values")
        else:  # heads side by side, or a few steps of one layer: small enough to compile whole
            self._add(drafter, "forward")
        for layer in target.layers:
            self._add(layer, "forward")

    @contextmanager
    def active(self) -> Iterator[None]:
        """The compiled forms for a while."""
        self._apply()
        try:
            yield
        finally:
            self._remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The plain forms again, inside `active`."""
        self._remove()
        try:
            yield
        finally:
            self._apply()

    def _add(self, module: nn.Module, name: str, wrap: _Wrap | None = None) -> None:
        compiled = _compiled(getattr(module, name))
        self._forms.append((module, name, wrap(compiled) if wrap else compiled))

    def _apply(self) -> None:
        for module, name, compiled in self._forms:
            module.__dict__[name] = compiled
        if isinstance(self._drafter, DraftModel):
            # FlexAttention has no backward pass on a CPU.
            on_gpu = self._drafter.device.type == "cuda"
            self._drafter.backbone.attention = "flex" if on_gpu else "dense"

    def _remove(self) -> None:
        for module, name, _ in self._forms:
            module.__dict__.pop(name, None)
        if isinstance(self._drafter, DraftModel):
            self._drafter.backbone.attention = "dense"


def _learning(layer: Callable[..., Any]) -> Callable[..., Any]:
    """The first layer's input is the target's and learns nothing: let it look as if it did.

    One form then serves all layers, which halves the time to compile.
    """

    def forward(states: Tensor, *rest: Any) -> Any:
        if torch.is_grad_enabled() and not states.requires_grad:
            states = states.detach().requires_grad_()
        return layer(states, *rest)

    return forward


def compiled_gradients() -> ChunkGradients:
    """The loss's elementwise part as fused kernels: it would otherwise be memory traffic alone."""
    return _compiled(chunk_gradients)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
