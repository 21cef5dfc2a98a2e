"""Full-precision weights and the optimisers that change them.

bfloat16 keeps eight bits: a small step added to a weight is rounded away. The optimiser therefore
owns float32 copies, gradients are summed in float32, and the model gets the rounded result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from domino_spec.checkpoints.packing import GROUP_SIZE
from domino_spec.checkpoints.quantise import rounded
from domino_spec.training.world import like, whole


class Masters:
    """The float32 parameters that are optimised, and the model's rounded copies of them.

    What a weight is multiplied with may be of any size: the target's own states have channels a
    thousand times larger than others. Its master is the weight times that size (`scales`), so that
    a step of the optimiser changes what is computed equally, whatever the target. Scales are
    powers of two: they round nothing.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        scales: Mapping[str, Tensor] | None = None,  # by name, broadcast to the parameter
        bits: int | None = None,
    ) -> None:
        """`bits` are those a drafter will be packed in; `packing` says from when on."""
        self.names: list[str] = []
        self.model: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.requires_grad:
                self.names.append(name)
                self.model.append(parameter)
        scales = scales or {}
        self._scales = [
            like(scales[name].expand(parameter.shape).contiguous(), parameter)
            if name in scales
            else None
            for name, parameter in zip(self.names, self.model, strict=True)
        ]
        self.own = bool(scales or bits) or any(p.dtype != torch.float32 for p in self.model)
        self._bits = bits
        self.packing = False
        """Whether the model's copies are rounded as packing rounds them; gradients are theirs."""
        self.parameters = self.model
        if self.own:
            self.parameters = [
                nn.Parameter(p.detach().float().clone() if scale is None else p.detach() * scale)
                for p, scale in zip(self.model, self._scales, strict=True)
            ]

    def take_gradients(self) -> None:
        """Add the model's gradients to the masters' and clear the model's."""
        if not self.own:
            return
        for master, parameter, scale in zip(self.parameters, self.model, self._scales, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float() if scale is None else parameter.grad / scale
            if master.grad is None:
                master.grad = gradient
            else:
                master.grad += gradient
            parameter.grad = None

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the masters."""
        return [parameter.grad for parameter in self.parameters]

    @gradients.setter
    def gradients(self, values: Iterable[Tensor | None]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = value

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        if self.own:
            torch._foreach_copy_(_local(self.model), _local(self._weights(packed=self.packing)))

    def _weights(self, *, packed: bool) -> list[Tensor]:
        """The masters as the model's weights, in full precision or as packing rounds them."""
        weights = [
            p.data if scale is None else p.data / scale
            for p, scale in zip(self.parameters, self._scales, strict=True)
        ]
        if packed and self._bits is not None:
            matrices = [index for index, weight in enumerate(weights) if weight.dim() == 2]
            found = rounded(
                [weights[index] for index in matrices], bits=self._bits, group_size=GROUP_SIZE
            )
            for index, weight in zip(matrices, found, strict=True):
                weights[index] = weight
        return weights

    def clip(self, limit: float) -> Tensor:
        """Scale all gradients to at most this norm; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters, *self.model):
            parameter.grad = None

    def state_dict(self, *, packed: bool = False) -> dict[str, Tensor]:
        """The full-precision weights by name, or as a drafter to be packed keeps them."""
        weights = self._weights(packed=packed)
        own: dict[str, Tensor] = whole(dict(zip(self.names, weights, strict=True)))
        return own

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what `state_dict` gave."""
        for name, parameter, scale in zip(self.names, self.parameters, self._scales, strict=True):
            weight = like(state[name], parameter)
            parameter.copy_(weight if scale is None else weight * scale)
        self.give_weights()


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of them."""
    return [t.to_local() if isinstance(t, DTensor) else t.data for t in map(torch.detach, tensors)]


OptimiserName = Literal["adamw", "muon"]

_VOCABULARY_SIDED = ("embed_proj.2", "markov")  # one row a token: not what Muon is for
_VECTOR_RATE = 10.0
"""Norms have few numbers, each of which matters more than one of a matrix: they move faster."""


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon over all matrices of one shape at once: a tenth of the launches.

    A step is momentum whose singular values are made about one by Newton and Schulz's iteration,
    times what gives it the size of a step of AdamW, so that both take the same learning rate.
    """

    _MOMENTUM = 0.95
    _ITERATIONS = 5
    _COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    _SIZE = 0.2  # root mean square of AdamW's steps

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of all that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for shape, matrices in alike.items():
                direction = self._direction(matrices)
                size = self._SIZE * max(shape) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, direction, alpha=-group["lr"] * size)

    def _direction(self, matrices: list[Tensor]) -> list[Tensor]:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        moments = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(moments, gradients, 1 - self._MOMENTUM)
        ahead = torch._foreach_lerp(gradients, moments, self._MOMENTUM)  # Nesterov's
        return list(self._orthogonal(torch.stack(list(ahead))).to(matrices[0].dtype).unbind())

    def _orthogonal(self, stack: Tensor) -> Tensor:
        """[n, rows, columns]: the same singular vectors, singular values of about one."""
        first, second, third = self._COEFFICIENTS
        tall = stack.shape[1] > stack.shape[2]
        x = stack.mT if tall else stack
        # A CPU without bfloat16 instructions takes 500 times as long for such a product, and
        # PyTorch gives up its fast float32 products for the whole process.
        x = x.bfloat16() if x.is_cuda else x.float()
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        for _ in range(self._ITERATIONS):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
            x = torch.baddbmm(x, polynomial, x, beta=first)
        return x.mT if tall else x


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
        vectors: list[nn.Parameter] = []
        for label, parameter in zip(names, parameters, strict=True):
            hidden = parameter.dim() == 2 and not any(part in label for part in _VOCABULARY_SIDED)
            if parameter.dim() == 1:
                vectors.append(parameter)
            else:
                (inner if name == "muon" and hidden else outer).append(parameter)
        fused = bool(parameters) and parameters[0].device.type == "cuda"
        self.parts: list[torch.optim.Optimizer] = []
        groups: list[dict[str, Any]] = [
            {"params": outer, "factor": 1.0, "weight_decay": weight_decay},
            {"params": vectors, "factor": _VECTOR_RATE, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if groups:
            self.parts.append(torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused))
        if inner:
            self.parts.append(Muon(inner, lr=0.0, weight_decay=weight_decay))

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group.get("factor", 1.0)
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
