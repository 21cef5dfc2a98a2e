"""The optimisers: AdamW for everything, or Muon for the matrices inside and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from domino_spec.training.world import like, whole

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
        self._parts: list[torch.optim.Optimizer] = []
        if outer:
            self._parts.append(
                torch.optim.AdamW(
                    outer, lr=0.0, betas=betas, weight_decay=weight_decay, fused=fused
                )
            )
        if inner:
            self._parts.append(
                torch.optim.Muon(
                    inner, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimisers themselves."""
        return self._parts

    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each part, whole and on the CPU."""
        states: list[dict[str, Any]] = whole([part.state_dict() for part in self._parts])
        return states

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take back what `state_dict` gave."""
        for part, state in zip(self._parts, states, strict=True):
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
