"""The engines of one target and drafter: made when first wanted, kept, grown, never two for one.

An engine runs one caller's rows at a time. Whoever comes while it is taken (two streams read in
turns) gets a twin over the same weights, which is given up afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch

from domino_spec.decoding import Row
from domino_spec.drafter import Drafter
from domino_spec.fast.calibration import adapt_depth, measured_rows
from domino_spec.fast.draft import why_not_drafts
from domino_spec.fast.engine import Engine
from domino_spec.fast.families import hooked_modules, why_not_lean
from domino_spec.fast.sizes import (
    Size,
    fitting,
    free_bytes,
    needed_capacity,
    packed_bytes,
    size_for,
    token_bytes,
)
from domino_spec.targets import Target

State = tuple[tuple[str, ...], tuple[tuple[int, int], ...]]
"""Who listens to the target's modules; where every weight lies, how often it was written to."""


class EnginePool:
    """Lends engines to runs."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        depth: int | None,
        candidates: int | None,
        pack: bool | None,
    ) -> None:
        """`depth` None lets cycles choose their own, from costs that are measured once."""
        self._target = target
        self._drafter = drafter
        self._adapts = depth is None and drafter is not None
        self._depth = None if drafter is None else depth
        self._candidates = None if drafter is None else candidates
        self._pack = pack
        self._kept: Engine | None = None
        self._source: Engine | None = None
        """Whose weights the next engine shares."""
        self._state: State = ((), ())
        self._reason: tuple[State, str | None] | None = None
        # One thread at a time; but a forgotten stream may be given back in the midst of a taking.
        self._lock = RLock()

    def why_not(self) -> str | None:
        """What keeps target or drafter off the engine, in words; None if nothing does."""
        state = _state(self._target, self._drafter)
        if self._reason is None or self._reason[0] != state:
            reason = why_not_lean(self._target)
            if reason is not None:
                reason = f"as for the target, {reason}"
            elif self._drafter is not None:
                reason = why_not_drafts(self._drafter.config, self._target.device)
            self._reason = (state, reason)
        return self._reason[1]

    def why_no_room(self, rows: Sequence[Row]) -> str | None:
        """Why no slot would fit into memory, in words; None if one does."""
        with self._lock:
            if self._size(rows) is not None:
                return None
        needed = needed_capacity(rows)
        size = needed * token_bytes(self._target, self._drafter) / 1e9
        return f"a slot of {needed} tokens takes {size:.1f} GB of memory, which is not free"

    @contextmanager
    def lend(self, rows: Sequence[Row], *, speculate: bool) -> Iterator[Engine]:
        """An engine with room for these rows (or some of them at a time) and for nobody else's."""
        with self._lock:
            engine = self._take(rows, speculate=speculate)
        try:
            yield engine
        finally:
            with self._lock:
                self._give_back(engine)

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(self, size: Size, *, reuse: bool) -> Engine:
        """An engine that is never lent to anybody else; weights are shared with those that are."""
        with self._lock:
            self._forget_old_weights()
            engine = self._made(size, reuse=reuse)
            if self._adapts:
                self._adapt(engine)
            return engine

    # A caller's inference mode must not make tensors that nobody else may write to.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, rows: Sequence[Row], *, speculate: bool) -> Engine:
        self._forget_old_weights()
        size = self._size(rows) or Size(1, needed_capacity(rows))
        engine, self._kept = self._kept, None
        if engine is None:
            engine = self._made(size)
        try:
            if not Size(engine.slots.count, engine.capacity).holds(size):
                engine.resize(slots=size.slots, capacity=size.capacity)
            engine.speculates = speculate
            if speculate and self._adapts:
                self._adapt(engine)
        except BaseException:
            self._give_back(engine)
            raise
        return engine

    def _forget_old_weights(self) -> None:
        if self._state != _state(self._target, self._drafter):
            self._kept = self._source = None

    def _made(self, size: Size, *, reuse: bool = False) -> Engine:
        if self._source is not None:
            return self._source.twin(slots=size.slots, capacity=size.capacity, reuse=reuse)
        engine = self._source = Engine(
            self._target,
            self._drafter,
            slots=size.slots,
            capacity=size.capacity,
            depth=self._depth,
            candidates=self._candidates,
            pack=self._packs(free_bytes(self._target.device)),
            reuse=reuse,
        )
        self._state = _state(self._target, self._drafter)
        return engine

    def _packs(self, free: int | None) -> bool:
        """Whether a new engine packs; where nobody says, only if the copy leaves as much free."""
        if self._target.device.type != "cpu" or self._pack is not None:
            return bool(self._pack)
        return free is None or 2 * packed_bytes(self._target, self._drafter) <= free

    def _adapt(self, engine: Engine) -> None:
        """Costs of as many rows as there are slots; what was measured before is not again."""
        slots = engine.slots.count
        if engine.policy is None or not engine.policy.knows(slots):
            adapt_depth(engine, batches=measured_rows(slots))

    def _give_back(self, engine: Engine) -> None:
        """Keep the one with more room; what shares no weights with later ones is out of date."""
        if self._source is None or engine.target.layers is not self._source.target.layers:
            return
        if self._kept is None or _slot_bytes(self._kept) < _slot_bytes(engine):
            self._kept = engine
        self._source = self._kept

    def _size(self, rows: Sequence[Row]) -> Size | None:
        wanted = size_for(rows, self._target)
        present, row = None, token_bytes(self._target, self._drafter)
        free = free_bytes(self._target.device)
        if free is not None and self._source is None and self._packs(free):
            free -= packed_bytes(self._target, self._drafter)
        if self._kept is not None:
            present = Size(self._kept.slots.count, self._kept.capacity)
            if present.holds(wanted):
                return present
            if free is not None:
                free += _slot_bytes(self._kept)  # given back before anything is taken
        if free is None:
            return wanted
        return fitting(wanted, present, needed_capacity(rows), row=row, free=free)


def _slot_bytes(engine: Engine) -> int:
    own = engine.target.cache.nbytes
    return own if engine.drafter is None else own + engine.drafter.cache.nbytes


def _state(target: Target, drafter: Drafter | None) -> State:
    weights = [*target.model.parameters(), *(() if drafter is None else drafter.parameters())]
    places = ((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
    return tuple(hooked_modules(target.model)), tuple(places)
