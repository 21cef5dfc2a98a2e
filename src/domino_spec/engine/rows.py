"""Which rows a forward runs, and on a CPU what all its layers need to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from domino_spec.engine.kernels.attention import mix, visible


@dataclass(frozen=True)
class Rows:
    """Rows of a forward: their slots, what these hold already, and how many tokens are new."""

    slots: Tensor  # [rows]
    starts: Tensor  # [rows]
    count: int
    """New tokens a row."""
    longest: int | None = None
    """A bound on starts + count, where the caller knows one."""
    _host: dict[int, HostRows] = field(default_factory=dict, compare=False)

    def on_host(self, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> HostRows:
        """Computed for the first layer of a model (each has a table of its own) and kept."""
        key = id(rotary[0])
        if key not in self._host:
            self._host[key] = HostRows(self, rotary, dtype)
        return self._host[key]


class Spans:
    """Rows where lengths can be read for nothing: each attends over a view of its own cache."""

    def __init__(self, slots: Tensor, starts: Tensor, count: int) -> None:
        self.count = count
        self.spans = list(zip(slots.tolist(), starts.tolist(), strict=True))
        self._seen: dict[tuple[int, bool, int | None], tuple[int, Tensor | None]] = {}

    def attend(
        self,
        query: Tensor,  # [rows, count, heads, head_dim]
        keys: Tensor,  # [slots, kv heads, capacity, head_dim]
        values: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """[rows, count, heads * head_dim], by the rule of `kernels.attention.attend`."""
        mixed = []
        for row, (slot, start) in enumerate(self.spans):
            end = min(start + self.count, keys.shape[2])
            first, seen = self._sees(row, end, causal=causal, window=window)
            mixed.append(
                mix(
                    query[row : row + 1],
                    keys[slot : slot + 1, :, first:end],
                    values[slot : slot + 1, :, first:end],
                    seen,
                    scale,
                    empty=causal and start == 0 and end == self.count and window is None,
                )
            )
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(2)

    def _sees(
        self, row: int, end: int, *, causal: bool, window: int | None
    ) -> tuple[int, Tensor | None]:
        """The first place of the cache that a row's tokens see, and who sees which of the rest."""
        key = (row, causal, window)
        if key not in self._seen:
            start = self.spans[row][1]
            first = 0 if window is None else min(max(start - window + 1, 0), end - 1)
            mask = None
            if window is not None or (causal and self.count > 1):
                positions = torch.arange(start, start + self.count)
                mask = visible(positions, torch.arange(first, end), causal, window)
            self._seen[key] = (first, mask)
        return self._seen[key]


class HostRows(Spans):
    """What all layers of a model need to know of its rows: spans, masks and angles."""

    def __init__(self, rows: Rows, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
        super().__init__(rows.slots, rows.starts, rows.count)
        cos, sin = rotary
        steps = torch.arange(rows.count)
        places = (rows.starts.unsqueeze(1) + steps).clamp(max=len(cos) - 1)  # [rows, count]
        self.cos = cos[places].to(dtype).unsqueeze(2)  # [rows, count, 1, head_dim]
        # Half of a head is turned by the negative sine: the sign is put in here.
        half = cos.shape[1] // 2
        signed = torch.cat((-sin[places][..., :half], sin[places][..., half:]), dim=-1)
        self.sin = signed.to(dtype).unsqueeze(2)

    def rotated(self, states: Tensor) -> Tensor:
        """Rotary positions on [rows, count, heads, head_dim]."""
        turned = states.roll(states.shape[-1] // 2, dims=-1)
        return (states * self.cos).addcmul_(turned, self.sin)
