"""Ideas of others that the recipe does not hold: `benchmarks.sweep` runs a plan's `tried` by name.

Each changes training and measuring alike while its context is open. One that wins moves into the
package; the rest stay here, so that their records can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from domino_spec.drafter import DraftModel, backbone
from domino_spec.training import acceleration, objective, run, start
from domino_spec.training.loss import chunk_gradients

_DECAY = 3.0
_GROUPS = 16


def tried(name: str | None) -> AbstractContextManager[None]:
    """The context of an idea; without a name nothing changes."""
    return nullcontext() if name is None else _IDEAS[name]()


@contextmanager
def _gradients(function: Callable[..., Any]) -> Iterator[None]:
    """Another loss of a chunk's labels, compiled or not."""
    with (
        mock.patch.object(acceleration, "chunk_gradients", function),
        mock.patch.object(run, "chunk_gradients", function),
    ):
        yield


def _likelihood(*inputs: Any) -> tuple[Any, ...]:
    """LK loss (2602.23881): by label KL and total variation, of the latter the more is right."""
    *chunk, weights, lam, _, sharpness, offsets = inputs
    zero, one = torch.zeros_like(lam), torch.ones_like(lam)
    distance = chunk_gradients(*chunk, torch.ones_like(weights), zero, one, sharpness, offsets)[0]
    share = 1 - torch.exp(-_DECAY * (1 - distance))  # of total variation
    kept = chunk_gradients(*chunk, weights * (1 - share), lam, None, sharpness, offsets)
    varied = chunk_gradients(*chunk, weights * share, lam, one, sharpness, offsets)
    return _summed(kept, varied)


def _until_first_error(*inputs: Any) -> tuple[Any, ...]:
    """AUF (2607.01893): base logits learn nothing behind their block's first error.

    `_places` gives each label's place in its block for whether it is corrected. Where a block's
    labels are not all there, or in the chunk before, they pass for right.
    """
    base, correction, teacher, best, drafts, weights, lam, variation, sharpness, offsets = inputs
    corrected = drafts >= 1
    chunk = (base, correction, teacher, best, corrected)
    right = base.gather(1, best.unsqueeze(1)).squeeze(1) >= base.amax(-1)
    reached = torch.ones_like(right)
    index = torch.arange(len(drafts), device=drafts.device)
    for back in range(1, 16):  # blocks are of 16 drafts at most
        own = (torch.roll(drafts, back) == drafts - back) & (index >= back)
        reached &= torch.roll(right, back) | ~own
    one, zero = torch.ones_like(lam), torch.zeros_like(lam)
    first = chunk_gradients(*chunk, lam * weights * reached, one, None, sharpness, offsets)
    final = chunk_gradients(*chunk, (1 - lam) * weights, zero, variation, sharpness, offsets)
    return _summed(first, final)


def _summed(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    loss, hit_base, hit_final, by_base, by_added = first
    added = None if by_added is None else by_added + second[4]
    return loss + second[0], hit_base, hit_final, by_base + second[3], added


@contextmanager
def _places() -> Iterator[None]:
    """Jobs that tell each label's place in its block in place of whether it is corrected."""
    make = objective.Objective._job

    def job(self: Any, target: Any, reading: Any, blocks: Any, *rest: Any) -> Any:
        return replace(make(self, target, reading, blocks, *rest), corrected=blocks.drafts)

    with mock.patch.object(objective.Objective, "_job", job), _gradients(_until_first_error):
        yield


class _ConvolvedLayer(backbone.DraftLayer):
    """Two taps over the slots of a block, by groups of channels, chosen by the slot itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._block = config.block_size
        self.taps = nn.Linear(config.hidden_size, 2 * _GROUPS, bias=False)

    def forward(self, states: Tensor, *rest: Any) -> Tensor:
        output: Tensor = super().forward(states, *rest)
        slots = output.view(-1, self._block, _GROUPS, output.shape[-1] // _GROUPS)
        before = torch.cat((torch.zeros_like(slots[:, :1]), slots[:, :-1]), dim=1)
        normal = self.post_attention_layernorm(output)
        here, there = self.taps(normal).view(-1, self._block, _GROUPS, 2).unbind(-1)
        mixed = slots * (1 + here.unsqueeze(-1)) + before * there.unsqueeze(-1)
        return mixed.reshape(output.shape)


@contextmanager
def _from_target() -> Iterator[None]:
    """First weights of the layers from the target's own, spread evenly over its depth."""
    fit = start.fit_to_sizes

    @torch.no_grad()
    def copied(drafter: Any, target: Any, sizes: Any) -> None:
        assert isinstance(drafter, DraftModel)
        own = list(drafter.backbone.layers)
        for index, layer in enumerate(own):
            given = target.layers[(index + 1) * len(target.layers) // len(own) - 1]
            weights = dict(given.named_parameters())
            for name, parameter in layer.named_parameters():
                if name in weights and weights[name].shape == parameter.shape:
                    parameter.copy_(weights[name])
        fit(drafter, target, sizes)

    with mock.patch.object(start, "fit_to_sizes", copied):
        yield


_IDEAS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lk": lambda: _gradients(_likelihood),
    "auf": _places,
    "convolution": lambda: mock.patch.object(backbone, "DraftLayer", _ConvolvedLayer),
    "layers of the target": _from_target,
}
