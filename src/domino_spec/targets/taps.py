"""Reads the outputs of chosen decoder layers during one forward, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from domino_spec.errors import TargetError


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head: what it returns goes into the lm_head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model


def find_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers: the outermost ModuleList of the right length."""
    found = [
        (name.count("."), name, module)
        for name, module in find_decoder(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise TargetError(
            f"{type(model).__name__} holds no list of {num_layers} decoder layers to tap; expected "
            "a ModuleList as in Llama, Qwen or Gemma."
        )
    return min(found, key=lambda entry: entry[:2])[2]


def first_tensor(output: Any) -> Tensor:
    """The hidden states in a layer's output, which is a tensor or a tuple that starts with one."""
    states = output[0] if isinstance(output, (tuple, list, ModelOutput)) else output
    if not isinstance(states, Tensor):
        raise TargetError(f"a tapped layer returned {type(states).__name__}; expected a tensor.")
    return states


@contextmanager
def tapped(points: Sequence[nn.Module], ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of these layers while the context is open.

    Hooks sit on the layers themselves: the model's own list of hidden states would hold every
    layer, and its last entry is already normed. Behind the layers comes the decoder as a whole:
    its output is what the lm_head turns into logits.
    """
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = first_tensor(output)

        return hook

    handles = [points[index].register_forward_hook(keep(index)) for index in ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
