"""How a row comes in: its prompt is read chunk by chunk, while others decode in between."""

from __future__ import annotations

from collections.abc import Callable

import torch

from domino_spec.decoding import Commit, Row
from domino_spec.errors import InputError
from domino_spec.fast.kernels.runtime import on_device
from domino_spec.fast.reading import PromptReader
from domino_spec.fast.sampling import needs_filter
from domino_spec.fast.scores import ScoreTable, score_columns
from domino_spec.fast.seats import Report, Seat
from domino_spec.fast.slots import Slots

PREFILL_CHUNK = 2048


class Admission:
    """A row on its way in. It has its slot; cycles leave it out until it has its first token."""

    def __init__(
        self,
        seat: Seat,
        *,
        reader: PromptReader,
        observed: bool,
        slots: Slots,
        seed: int,
        chunk: int,
        release: Callable[[Row], None],
    ) -> None:
        """`observed`: whether the drafter is told of this row's tokens."""
        self.row = seat.row
        self.reused = seat.reused
        """Tokens of the prompt whose states were there already."""
        self._seat = seat
        self._reader = reader
        self._observed = observed
        self._slots = slots
        self._seed = seed
        self._chunk = chunk
        self._release = release

    @property
    def remaining(self) -> int:
        """Tokens of the prompt still to be read."""
        return len(self.row.prompt) - self._seat.read

    def reuse(self) -> None:
        """Begin behind the tokens that a slot holds already."""
        seat = self._seat
        if seat.source != seat.slot:
            self._reader.copy(seat.source, seat.slot, seat.reused, observed=self._observed)
        seat.read = seat.reused

    def advance(self) -> Commit | None:
        """Read one more chunk; the last one gives the first token, and the row decodes from now on.

        None while more is to come. If this raises, the row has left its slot.
        """
        if self._seat.left:
            raise InputError("the row has left its slot; begin with a new row.")
        if not self._seat.reading:
            raise InputError("the prompt is read and the row decodes; advance the engine instead.")
        try:
            with on_device(self._slots.device):
                first = self._read()
            if first is None:
                return None
            commit = self._seat.take(first)
            if commit.finish_reason is not None:
                self._release(self.row)
            return commit
        except BaseException:
            self._release(self.row)
            raise

    def finish(self) -> Commit:
        """Read all that is left."""
        while (first := self.advance()) is None:
            pass
        return first

    @torch.no_grad()
    def _read(self) -> Report | None:
        seat, device, reader = self._seat, self._slots.device, self._reader
        start = seat.read
        part = seat.row.prompt[start : start + self._chunk]
        last = reader.read(part, slot=seat.slot, start=start, observed=self._observed)
        seat.read += len(part)
        if self.remaining:
            return None
        params, prompt = seat.params, seat.row.prompt
        self._slots.open(seat.slot, prompt=prompt, anchor=0, params=params, seed=self._seed)
        place = torch.tensor([seat.slot], device=device)
        draws = self._slots.draws(place, sampled=params.samples, filtered=needs_filter(params))
        logits = reader.logits(last).view(1, 1, -1)
        judged = logits
        if params.penalises:
            judged = self._slots.penalties.apply(logits, place, None)
        chosen = draws.choose(judged, torch.tensor([len(prompt) - 1], device=device))
        self._slots.anchors[seat.slot] = chosen[0, 0]
        scores, top = None, params.logprobs
        if top is not None:
            columns = score_columns(logits, chosen, ranked=top > 0).cpu()
            scores = ScoreTable(columns, 1).of(0, tokens=1, top=top)
        return 0, [int(chosen)], scores
