"""The lean target: embedding, layers over slots, taps, logits, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from domino_spec.engine.cache import SlotCache
from domino_spec.engine.families import read_shape, rotary_table, unsupported_reason
from domino_spec.engine.kernels.linear import Normed, embedded, linear
from domino_spec.engine.kernels.packing import Weight, packed
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.layer import run_layer
from domino_spec.engine.rows import Rows
from domino_spec.engine.weights import adopt_layer, nbytes
from domino_spec.errors import InputError, TargetError
from domino_spec.targets import Target


class LeanTarget:
    """A target's weights and its cache in slots."""

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        reason = unsupported_reason(target)
        if reason is not None:
            raise TargetError(f"{target.name} cannot run on the lean forward: {reason}.")
        self.shape = read_shape(target.config)
        self.device, self.dtype = target.device, target.dtype
        self.vocab_size = target.vocab_size
        embedding, lm_head = (
            cast("nn.Embedding", target.embedding),
            cast("nn.Linear", target.lm_head),
        )
        self.embedding = embedding.weight.detach()
        self.lm_head = lm_head.weight.detach()
        self.lm_head_bias = None if lm_head.bias is None else lm_head.bias.detach()
        self.output: Weight = packed(self.lm_head) if pack else self.lm_head
        self.layers = [adopt_layer(layer) for layer in target.layers]
        if pack:
            self.layers = [weights.packed() for weights in self.layers]
        decoder = target.model.get_decoder()
        self.norm = decoder.norm.weight.detach()
        self._positions: nn.Module = decoder.rotary_emb
        self.rotary = rotary_table(self._positions, capacity, self.device)
        self.cache = SlotCache(
            layers=len(self.layers),
            slots=slots,
            kv_heads=self.shape.kv_heads,
            capacity=capacity,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""
        self.cache.resize(slots=slots, capacity=capacity)
        self.rotary = rotary_table(self._positions, capacity, self.device)

    def twin(self, *, slots: int, capacity: int) -> LeanTarget:
        """The same weights with slots of its own."""
        other = copy.copy(self)
        other.cache = self.cache.twin()
        other.resize(slots=slots, capacity=capacity)
        return other

    def forward(
        self, tokens: Tensor, rows: Rows, taps: Sequence[int] = ()
    ) -> tuple[Normed, Tensor]:
        """States behind the last layer [rows * count, hidden], and tapped ones side by side.

        `tokens` is [rows, count]; they go into the cache behind each row's start. The tap behind
        all layers is `Target.final_tap`: what the lm_head reads.
        """
        norms = [*(weights.input_norm for weights in self.layers), self.norm]
        states = embedded(tokens.flatten(), self.embedding, norms[0], self.shape.eps)
        tapped = states.rows.new_empty(len(states.rows), len(taps), self.shape.hidden)
        wanted = {layer: place for place, layer in enumerate(taps)}
        for index, weights in enumerate(self.layers):
            states = run_layer(
                states,
                weights,
                self.cache.layer(index),
                self.rotary,
                rows,
                self.shape,
                causal=True,
                window=self.shape.windows[index],
                norm=norms[index + 1],
                out=tapped[:, wanted[index]] if index in wanted else None,
            )
        if (last := wanted.get(len(self.layers))) is not None:
            tapped[:, last] = rms_norm(states.rows, self.norm, self.shape.eps)
        return states, tapped.flatten(1)

    def logits(self, states: Normed) -> Tensor:
        """[n, hidden], by the last norm -> [n, vocabulary]."""
        return linear(states, self.output, bias=self.lm_head_bias)

    @property
    def nbytes(self) -> int:
        """What one forward of one token reads of the weights."""
        return sum(weights.nbytes for weights in self.layers) + nbytes([self.lm_head])

    def read(
        self, tokens: Sequence[int], *, slot: int, start: int, taps: Sequence[int] = ()
    ) -> tuple[Normed, Tensor, Rows]:
        """Read a part of a prompt behind the `start` tokens of a slot: states, taps, and where."""
        check_tokens(tokens, self.vocab_size)
        part = torch.tensor([list(tokens)], device=self.device)
        place = torch.tensor([slot], device=self.device)
        starts = torch.tensor([start], device=self.device)
        rows = Rows(place, starts, len(tokens), longest=start + len(tokens))
        return *self.forward(part, rows, taps), rows


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the target does not know: a kernel would read behind the embedding's end."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InputError(
            f"the prompt holds ids from {min(tokens)} to {max(tokens)}; the target knows 0 to "
            f"{vocab_size - 1}. Was it made with another tokenizer?"
        )
