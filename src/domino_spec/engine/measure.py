"""Where a cycle's time goes, held against the time that its bytes take to come from memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from domino_spec.decoding.drafter import DraftPart
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.model_runner import Plan, PromptChunk
from domino_spec.engine.sampling import Draws
from domino_spec.engine.weights import nbytes
from domino_spec.errors import InputError

K = TypeVar("K")
_NEARLY = 1.25
"""Rounds that differ by less met the same machine."""
_PROMPT = 8
"""Tokens of a pretended context that are computed: as many as a deep cycle verifies."""
_SEED = 20


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a cycle."""

    name: str
    seconds: float
    bytes: int
    """Each weight once, and the keys and values of the context; 0 where they are not counted."""


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a kernel that reads and writes much; both are counted.

    Not a mere copy: captured in a graph, that goes to the copy engines, which are slower.
    """
    size = (4 << 30) if device.type == "cuda" else (1 << 28)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).fill_(1.0)
    goal = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: torch.neg(source, out=goal), device)


def seconds_of(call: Callable[[], Any], device: torch.device, *, repeats: int = 20) -> float:
    """The median time of a call; on a GPU captured first, so that launches cost nothing."""
    with on_device(device):
        if device.type == "cuda":
            return _captured_seconds(call, repeats)
        call()
        return statistics.median(_clocked(call) for _ in range(min(repeats, 7)))


def least_seconds(
    calls: Mapping[K, Callable[[], Any]],
    *,
    most: int,
    fewest: int = 1,
    enough: float = math.inf,
    before: Callable[[], None] = lambda: None,
) -> tuple[dict[K, float], bool]:
    """The least of a few rounds of each call on a CPU, where other load only ever adds.

    And whether it is settled: the two least rounds of each are nearly the same. So many rounds at
    most, fewer once all is settled and, once there were the fewest, none after `enough` seconds.
    `before` comes before each call and is not timed; nor is a first round, which prepares the
    others.
    """
    spent: dict[K, list[float]] = {name: [] for name in calls}
    began, settled = time.perf_counter(), False
    for turn in range(1 + most):
        for name, call in calls.items():
            before()
            seconds = _clocked(call)
            if turn:
                spent[name].append(seconds)
        settled = turn > 1 and all(_settled(each) for each in spent.values())
        if turn >= fewest and (settled or time.perf_counter() - began > enough):
            break
    return {name: min(each) for name, each in spent.items()}, settled


def _settled(seconds: Sequence[float]) -> bool:
    least, second, *_ = sorted(seconds)
    return second < _NEARLY * least


def _captured_seconds(call: Callable[[], Any], repeats: int) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    for _ in range(3):
        graph.replay()
    spent = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(spent))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _clocked(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Bench:
    """An engine whose first slots pretend to hold `context` tokens.

    The last few of them, and the anchors, are random tokens, others in each slot. Which experts a
    cycle reads, and so what it costs, follows from what its sequences hold.
    """

    def __init__(self, engine: Engine, *, context: int) -> None:
        if engine.running:
            raise InputError(
                f"{engine.running} sequences are running; measuring would overwrite them. Measure "
                "an idle engine."
            )
        self.engine = engine
        self.context = context
        self.device = engine.target.device
        generator = torch.Generator().manual_seed(_SEED)
        shape = (engine.slots.count, min(_PROMPT, context) + 1)
        self._tokens = torch.randint(engine.target.vocab_size, shape, generator=generator)
        self._computed: set[tuple[int, bool]] = set()
        """Batch sizes whose prompts lie in the caches, and whether in the drafter's too."""

    def metadata(self, batch: int, count: int) -> AttentionMetadata:
        """The first slots, with `count` new tokens each."""
        slots = torch.arange(batch, device=self.device)
        return AttentionMetadata(slots, self.engine.slots.lengths[slots].clone(), count)

    def reset(self, batch: int, *, drafts: bool = True) -> None:
        """The first slots hold `context` tokens again, of which nothing is reused later.

        The drafter has read them too where there are `drafts`.
        """
        slots = self.engine.slots
        self.engine.forget()
        self.engine.runner.update_draft_cache()  # no part of what is timed next
        slots.lengths.fill_(self.context)
        slots.anchors[: slots.count] = self._tokens[:, -1].to(self.device)
        if (batch, drafts) not in self._computed:
            prompts = self._tokens[:batch, :-1].tolist()
            start = self.context - len(prompts[0])
            parts = [PromptChunk(slot, start, prompt) for slot, prompt in enumerate(prompts)]
            self.engine.runner.prefill(parts, drafts=drafts)
            self._computed.add((batch, drafts))

    def _block(self, metadata: AttentionMetadata, depth: int) -> Tensor:
        """Anchors and so many drafts, [batch, depth + 1]."""
        draft = self.engine.runner.draft
        return draft(metadata.slots, metadata.starts, Draws(), Plan(depth)).block

    def plain_seconds(self, batch: int) -> float:
        """A step of plain decoding, as an engine without a drafter takes it."""
        return self.cycle_seconds(batch, Plan(0, alone=True))

    def cycle_seconds(self, batch: int, plan: Plan) -> float:
        """A whole cycle; without drafts what it captures is still kept for the drafter."""
        self.reset(batch, drafts=not plan.alone)
        slots = torch.arange(batch, device=self.device)
        return seconds_of(lambda: self.engine.runner.run_cycle(slots, plan), self.device)

    def stages(self, batch: int, depth: int) -> list[Stage]:
        """The parts of a cycle, each timed alone."""
        target, drafter = self.engine.target, self.engine.drafter
        assert drafter is not None
        self.reset(batch)
        metadata = self.metadata(batch, depth + 1)
        with on_device(self.device), torch.no_grad():
            block = self._block(metadata, depth)
            anchors = block[:, 0].clone()
            states, captured = target.forward(block, metadata, drafter.capture_layers)
        place: dict[str, Any] = {"slots": metadata.slots, "starts": metadata.starts}
        head = nbytes([target.lm_head])
        layers = target.nbytes - head

        def verify() -> Tensor:
            logits = target.logits(states).view(batch, depth + 1, -1)
            return Draws().choose(logits, metadata.starts)

        with on_device(self.device), torch.no_grad():
            drafting = drafter.parts(
                anchors, **place, depth=depth, sampler=Draws(), cached=batch * self.context
            )
        timed: Sequence[DraftPart] = (
            *drafting,
            ("verify", lambda: target.forward(block, metadata, drafter.capture_layers),
             layers + self.kv_bytes(batch, target)),
            ("logits and choice", verify, head),
            ("context for the drafter", lambda: drafter.update_cache(captured, block, **place),
             drafter.update_bytes),
        )  # fmt: skip
        with torch.no_grad():
            return [
                Stage(name=name, seconds=seconds_of(call, self.device), bytes=size)
                for name, call, size in timed
            ]

    def tree_stages(self, batch: int, depth: int, nodes: int) -> list[Stage]:
        """The parts of drafting a tree, each timed alone."""
        drafter = self.engine.drafter
        assert drafter is not None
        self.reset(batch)
        metadata = self.metadata(batch, 1)
        with on_device(self.device), torch.no_grad():
            parts = drafter.parts(
                self.engine.slots.anchors[metadata.slots],
                slots=metadata.slots,
                starts=metadata.starts,
                depth=depth,
                sampler=Draws(),
                cached=batch * self.context,
                nodes=nodes,
            )
            return [
                Stage(name=name, seconds=seconds_of(call, self.device), bytes=size)
                for name, call, size in parts
            ]

    def kv_bytes(self, batch: int, part: Any) -> int:
        """Keys and values that a forward reads."""
        return int(batch * self.context * part.cache.token_bytes)

    def floor_bytes(self, batch: int, *, drafts: bool) -> int:
        """What a plain step, or a cycle, cannot do without."""
        target, drafter = self.engine.target, self.engine.drafter
        size = target.nbytes + self.kv_bytes(batch, target)
        if drafts and drafter is not None:
            size += drafter.cycle_bytes(batch * self.context)
        return size

    def paced(self, batch: int, depth: int, accepted: Sequence[int], *, cycles: int) -> float:
        """Tokens a second of the engine itself, host and all, with acceptance forced."""
        engine = self.engine
        engine.runner.force(accepted)
        slots, tokens = list(range(batch)), 0
        plan = Plan(depth, forced=True, alone=depth == 0)
        engine.runner.start_cycle(slots, plan)()  # captured
        self.reset(batch, drafts=not plan.alone)
        launched = []
        start = time.perf_counter()
        for _ in range(cycles):
            launched.append(engine.runner.start_cycle(slots, plan))
            if len(launched) > int(engine.ahead):
                tokens += int(launched.pop(0)()[:, 0].sum()) + batch
        for report in launched:
            tokens += int(report()[:, 0].sum()) + batch
        return tokens / (time.perf_counter() - start)


def geometric(tokens_per_cycle: float, depth: int) -> float:
    """The chance of each draft, given those before it, that makes so many tokens a cycle."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, depth) < tokens_per_cycle else (low, middle)
    return (low + high) / 2


def expected(chance: float, depth: int) -> float:
    """Tokens a cycle of `depth` drafts."""
    return sum(chance**i for i in range(depth + 1))


def accepted_pattern(chance: float, depth: int, *, length: int = 64) -> list[int]:
    """Accepted drafts, cycle by cycle: the same shares as chance would give, well mixed."""
    counts = []
    for index in range(length):
        drawn = (index + 0.5) / length
        counts.append(sum(drawn < chance**i for i in range(1, depth + 1)))
    step = next(s for s in range(length // 2 + 1, 2 * length) if math.gcd(s, length) == 1)
    return [counts[index * step % length] for index in range(length)]
