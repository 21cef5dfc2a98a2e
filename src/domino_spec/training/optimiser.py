"""Full-precision weights and the optimisers that change them.

bfloat16 keeps eight bits: a small step added to a weight is rounded away. The optimiser therefore
owns float32 copies, gradients are summed in float32, and the model gets the rounded result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from domino_spec.training.world import like, whole


class Masters:
    """The float32 parameters that are optimised, and the model's rounded copies of them."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.names: list[str] = []
        self.model: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.requires_grad:
                self.names.append(name)
                self.model.append(parameter)
        self.own = any(p.dtype != torch.float32 for p in self.model)
        self.parameters = (
            [nn.Parameter(p.detach().float().clone()) for p in self.model]
            if self.own
            else self.model
        )

    def take_gradients(self) -> None:
        """Add the model's gradients to the masters' and clear the model's."""
        if not self.own:
            return
        for master, parameter in zip(self.parameters, self.model, strict=True):
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        if self.own:
            torch._foreach_copy_([p.data for p in self.model], [p.data for p in self.parameters])

    def clip(self, limit: float) -> Tensor:
        """Scale all gradients to at most this norm; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters, *self.model):
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The full-precision weights by name."""
        own: dict[str, Tensor] = whole(dict(zip(self.names, self.parameters, strict=True)))
        return own

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what `state_dict` gave."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            parameter.copy_(like(state[name], parameter))
        self.give_weights()


OptimiserName = Literal["adamw", "muon"]

_VOCABULARY_SIDED = ("embed_proj.2", "markov")  # one row a token: not what Muon is for


class Optimiser:
    """One or two optimisers that share a learning rate and step together."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        name: OptimiserName,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        inner: list[nn.Parameter] = []
        outer: list[nn.Parameter] = []
        for label, parameter in zip(names, parameters, strict=True):
            hidden = parameter.dim() == 2 and not any(part in label for part in _VOCABULARY_SIDED)
            (inner if name == "muon" and hidden else outer).append(parameter)
        fused = bool(parameters) and parameters[0].device.type == "cuda"
        self.parts: list[torch.optim.Optimizer] = []
        if outer:
            self.parts.append(
                torch.optim.AdamW(
                    outer, lr=0.0, betas=betas, weight_decay=weight_decay, fused=fused
                )
            )
        if inner:
            self.parts.append(
                torch.optim.Muon(
                    inner, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each part, whole and on the CPU."""
        states: list[dict[str, Any]] = whole([part.state_dict() for part in self.parts])
        return states

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take back what `state_dict` gave."""
        for part, state in zip(self.parts, states, strict=True):
            parameters = [p for group in part.param_groups for p in group["params"]]
            own = {
                index: {
                    name: like(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                    for name, value in values.items()
                }
                for index, values in state["state"].items()
            }
            part.load_state_dict({**state, "state": own})
