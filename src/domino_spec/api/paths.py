"""Which loop runs a request: the engine where it gives the same, the reference loop elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Literal, get_args

import torch

from domino_spec.api.notices import DraftWatch, tell_reference
from domino_spec.decoding import (
    Commit,
    DominoProposer,
    NoDrafts,
    Proposer,
    Row,
    RunStats,
    SamplingParams,
    decode,
)
from domino_spec.drafter import Drafter
from domino_spec.errors import InputError
from domino_spec.fast.engine import Engine
from domino_spec.fast.pool import EnginePool
from domino_spec.fast.sampling import why_not_on_device
from domino_spec.fast.sizes import Size
from domino_spec.targets import Target

EngineChoice = Literal["auto", "fast", "reference"]


class Paths:
    """The two ways to decode with one target and drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        engine: EngineChoice,
        depth: int | None,
        candidates: int | None,
        pack: bool | None,
    ) -> None:
        """`depth` None is the drafter's own in the reference loop; the engine chooses by cost."""
        if engine not in get_args(EngineChoice):
            choices = ", ".join(map(repr, get_args(EngineChoice)))
            raise InputError(f"engine is {engine!r}; expected one of {choices}.")
        self._target = target
        self._drafter = None if depth == 0 else drafter
        self._choice = engine
        self._depth = depth
        self._candidates = candidates
        self._pool = EnginePool(
            target, self._drafter, depth=depth, candidates=candidates, pack=pack
        )
        self._watch = DraftWatch(drafter, target)
        self._told: set[str] = set()
        if engine == "fast":
            self._refuse(self._pool.why_not())

    def run(
        self,
        rows: Sequence[Row],
        params: Sequence[SamplingParams] | None,
        stats: RunStats,
        *,
        speculate: bool,
    ) -> Iterator[Commit]:
        """Decide now, decode as the result is iterated."""
        reason = self._why_not(rows, params)
        if params is not None and reason is None:
            stats.engine = "fast"
            return self._on_engine(rows, params, stats, speculate=speculate)
        stats.engine_reason = reason
        return self._in_loop(rows, stats, speculate=speculate)

    def why_not(self) -> str | None:
        """What keeps target, drafter or wish off the engine, whatever the request."""
        if self._choice == "reference":
            return "engine='reference' was asked for"
        return self._pool.why_not()

    def make_engine(self, *, slots: int, capacity: int, reuse: bool) -> Engine:
        """An engine that is nobody else's."""
        return self._pool.make(Size(slots, capacity), reuse=reuse)

    def _why_not(self, rows: Sequence[Row], params: Sequence[SamplingParams] | None) -> str | None:
        """Why the engine does not run this, in words; said once, or raised where it is wanted."""
        if self._choice == "reference":
            return "engine='reference' was asked for"
        if params is None:
            reason = "the rows choose their tokens by rules of the caller's own"
            if self._choice == "fast":
                self._refuse(reason)
            return reason
        reasons = map(why_not_on_device, params)
        asked = next((f"as for the request, {reason}" for reason in reasons if reason), None)
        found = self._pool.why_not() or asked or self._pool.why_no_room(rows)
        if self._choice == "fast":
            self._refuse(found)
        if found is not None:
            self._tell(found)
        return found

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise InputError(
                f"engine is 'fast', but the engine cannot run this: {reason}. With 'auto' the "
                "reference loop does."
            )

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            tell_reference(reason)

    # In inference mode tensors would be made that later runs may not write to.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _on_engine(
        self,
        rows: Sequence[Row],
        params: Sequence[SamplingParams],
        stats: RunStats,
        *,
        speculate: bool,
    ) -> Iterator[Commit]:
        with ExitStack() as stack:
            engine = None
            try:
                engine = stack.enter_context(self._pool.lend(rows, speculate=speculate))
            except torch.OutOfMemoryError:
                if self._choice == "fast":
                    raise
            if engine is None:  # outside the except: an error holds what was made before it
                stats.engine, stats.engine_reason = "reference", "it ran out of memory"
                self._tell(stats.engine_reason)
                yield from self._in_loop(rows, stats, speculate=speculate)
                return
            stack.callback(self._watch.end, stats)
            policy = engine.policy if engine.speculates else None
            seeds = [row.sampler.seed for row in rows]
            seated = list(zip(rows, params, seeds, strict=True))
            for commit in stack.enter_context(closing(engine.run(seated, stats))):
                yield commit
                self._watch.look(stats, policy)

    def _in_loop(
        self, rows: Sequence[Row], stats: RunStats, *, speculate: bool
    ) -> Iterator[Commit]:
        try:
            for commit in decode(self._target, self.proposer(speculate=speculate), rows, stats):
                yield commit
                self._watch.look(stats, None)
        finally:
            self._watch.end(stats)

    def proposer(self, *, speculate: bool = True) -> Proposer:
        """A fresh source of drafts for one run of the reference loop."""
        if self._drafter is None or not speculate:
            return NoDrafts()
        depth = self._drafter.config.default_depth if self._depth is None else self._depth
        return DominoProposer(self._drafter, self._target, depth=depth, candidates=self._candidates)
