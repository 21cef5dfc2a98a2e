"""Between products of quantised weights: norms, gates, and attention of each token alone.

Each row of a result depends on its own row alone, to the bit, whatever else a forward computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from domino_spec.quantization import reference
from domino_spec.quantization.compiled import kernel, threads_here

_THREAD_WORK = 1 << 15
"""Numbers of keys that are worth a further thread."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of [..., width] by its root mean square, times the weight [width]."""
    compiled = kernel()
    return (reference if compiled is None else compiled).rms_norm(x, weight, eps)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    compiled = kernel()
    return (reference if compiled is None else compiled).silu(x)


def gate_rows(x: Tensor) -> Tensor:
    """silu of the first half of each row of [m, 2 * width], times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


class RMSNorm(nn.Module):
    """Transformers' norm of the same weights."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Each row of [..., width]."""
        return rms_norm(x, self.weight, self.variance_epsilon)


class SiLU(nn.Module):
    """An MLP's activation."""

    def forward(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        return silu(x)


@dataclass(frozen=True)
class KeyRanges:
    """Which places of their slots tokens see: a stretch of them, and single ones after it."""

    spans: Tensor  # [tokens, 5] int64: slot, first, end, where its extras begin, how many
    extras: Tensor  # [n] int32
    pairs: int
    """Of a token and a place that it sees."""

    @classmethod
    def of(
        cls, spans: list[tuple[int, int, int]], extras: list[list[int]] | None = None
    ) -> KeyRanges:
        """Of each token: its slot, first place and end; and the places of its extras."""
        rows = []
        flat: list[int] = []
        for token, (slot, first, end) in enumerate(spans):
            own = [] if extras is None else extras[token]
            rows.append((slot, first, end, len(flat), len(own)))
            flat.extend(own)
        pairs = sum(end - first for _, first, end in spans) + len(flat)
        return cls(
            torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5),
            torch.tensor(flat, dtype=torch.int32, device="cpu"),
            pairs,
        )


def attend(
    query: Tensor,  # [tokens, heads, head_dim]
    keys: Tensor,  # [slots, kv heads, places, head_dim]
    values: Tensor,
    seen: KeyRanges,
    scale: float,
) -> Tensor:
    """Attention of each token alone, over the places that it sees: [tokens, heads * head_dim]."""
    compiled = kernel()
    apart = keys.stride(2) != keys.shape[3] or keys.stride(3) != 1
    if compiled is None or apart or values.stride() != keys.stride():
        return reference.attend(query, keys, values, seen.spans, seen.extras, scale)
    threads = min(threads_here(), seen.pairs * keys.shape[1] * keys.shape[3] // _THREAD_WORK)
    return compiled.attend(
        query.contiguous(), keys, values, seen.spans, seen.extras, scale, max(threads, 1)
    )
