"""What runs on the device: prefill, and cycles of draft, verify, accept and commit.

Nothing here waits for the host. Of a small model's forward nearly all is the host launching
kernels. So on a GPU each kind of cycle is captured in a CUDA graph, for batches filled up to one of
a few sizes. Prompts are computed together, padded to one of a few shapes, each captured once, where
launching costs more than computing. Padding comes after a prompt: no token of it sees that, and the
next tokens are written over it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from domino_spec.decoding import Drafter, SamplingParams
from domino_spec.decoding.processors import banned_tokens
from domino_spec.drafter.tree import DraftTree
from domino_spec.engine.accept import accept
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.constrained import DraftMasks
from domino_spec.engine.hooks import HookedWalk
from domino_spec.engine.kernels.attention import MAX_TOKENS
from domino_spec.engine.kernels.commit import commit, commit_tree
from domino_spec.engine.kernels.lengths import Lengths, Sequences
from domino_spec.engine.kernels.linear import Normed, normed
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.kernels.scratch import apart
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import DraftLogits, Draws, needs_filter
from domino_spec.engine.scores import AT_ONCE, prompt_columns, score_columns
from domino_spec.engine.slots import Slots
from domino_spec.engine.verify_lengths import AcceptanceModel, RaggedBlocks
from domino_spec.errors import InputError

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches of captured cycles are filled up to one of these sizes."""
MOST_GRAPHS = 384
"""Kinds of cycles kept; each takes a few megabytes, and requests of all kinds make more."""
PROMPT_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""A prompt alone is padded to one of these; longer ones keep the GPU busy by themselves."""
PROMPT_COUNTS = (2, 4, 8, 16, 32)
"""Several prompts are filled up to one of these counts, and padded to ..."""
SHARED_LENGTHS = (16, 64, 128, 256, 512, 1024)
"""... one of these: few, since each count is captured with each length."""
_LONGEST_CAPTURED = 4096
"""Forwards that see more are not captured: what their attention needs would stay taken for good."""
_CHEAP_TOKENS, _CHEAP_PRODUCTS = 2048, 4e10
"""Tokens, and tokens times a layer's weights, that a GPU computes while kernels are launched."""
_MOST_REPLAYS = 8
"""Forwards into which prompts are split so that each is captured."""
_LONGEST_SHARED = 512
"""Several prompts of which some follow other tokens share a captured forward up to here."""
_SIMILAR = 0.7
"""Prompts share a forward if each is at least so long, compared with the longest of them."""
LONGEST_PATTERN = 1024
MOST_DEFERRED = 32
"""Tokens of plain steps that wait for one update of the draft cache: so many read the projection's
weights once, and with more a token would hardly cost less."""
KINDS = ("sampled", "uncoupled", "filtered", "penalised", "scored", "ranked")
"""What of a plan adds work for every token that a cycle verifies."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What kind of cycle it is; each kind is captured once."""

    depth: int
    """Drafts verified; 0 is plain decoding."""
    nodes: int = 0
    """Drafts of a tree that is up to `depth` deep; 0 verifies a chain."""
    budget: int = 0
    """Drafts of a chain that a sequence verifies on average, by their chances; 0 verifies all."""
    sampled: bool = False
    """Whether some sequence draws its tokens."""
    uncoupled: bool = False
    """Whether some sequence has another accept rule than the coupled one ..."""
    mixed: bool = False
    """... and some does not draw its drafts from the drafter's own distribution."""
    filtered: bool = False
    """Whether some sequence cuts tokens off before it draws."""
    penalised: bool = False
    """Whether some sequence pays for tokens it repeats."""
    biased: bool = False
    """Whether some sequence has biases, or a minimum length."""
    scored: bool = False
    """Whether some sequence wants to know how likely its tokens were."""
    ranked: bool = False
    """Whether some sequence wants to know the likeliest tokens too."""
    alone: bool = False
    """Whether these sequences never draft: the draft cache is not updated for them."""
    hooked: bool = False
    """Whether these sequences have processors or hooks: the host chooses after the forward."""
    constrained: bool = False
    """Whether some sequence has a grammar: the host makes masks after the forward."""
    forced: bool = False
    """Whether acceptance is pretended (benchmarks only)."""

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], depth: int, nodes: int = 0, *, alone: bool
    ) -> Plan:
        """What sequences with these parameters need: a chain, where a tree cannot be verified."""
        if any(each.draws_drafts or each.hooked or each.constrained for each in params):
            nodes = 0
        sampled = any(each.samples for each in params)
        filtered = any(needs_filter(each) for each in params)
        uncoupled = depth > 0 and any(each.samples and each.rule != "coupled" for each in params)
        return cls(
            min(depth, nodes) if nodes else depth,
            nodes,
            sampled=sampled,
            uncoupled=uncoupled,
            mixed=uncoupled and not all(each.draws_drafts for each in params),
            filtered=filtered,
            penalised=any(each.penalises for each in params),
            biased=any(each.biased for each in params),
            scored=any(each.logprobs is not None for each in params),
            ranked=any(each.logprobs for each in params),
            alone=alone,
            hooked=any(each.hooked for each in params),
            constrained=any(each.constrained for each in params),
        )

    @property
    def pads(self) -> bool:
        """Whether choosing looks at a sequence's tokens together, or their logits are reported."""
        return self.uncoupled or self.penalised or self.scored

    @property
    def on_host(self) -> bool:
        """Whether the device's own part of a cycle ends with the forward."""
        return self.hooked or self.constrained

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of `KINDS` that it is of; biases cost no more than penalties."""
        flags = {**vars(self), "penalised": self.penalised or self.biased}
        return tuple(kind for kind in KINDS if flags[kind])


class GraphRecorder:
    """Captures work on device tensors alone in CUDA graphs, all in one pool of memory.

    What one graph leaves in its results, another may write over.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def can_record(self, work: Callable[[], object]) -> bool:
        """Run it once, already compiled: whether nothing in it waits for the GPU."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return True

    def record(
        self, work: Callable[[], _T], *, large: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, _T]:
        """A graph on the current GPU, and the results that each replay fills anew.

        `large` work has run before, and has a pool of its own, which goes with its graph.
        """
        if large:
            torch.cuda.empty_cache()
        else:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compile and allocate before anything is recorded
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = None if large else self._pool
        # Other threads may use the GPU meanwhile: only ours is watched.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = work()
        if not large:
            self._pool = self._pool or graph.pool()
        return graph, results


class SideStream:
    """A second stream on a GPU; on CPUs the work is done where it stands.

    The update of the draft cache depends on the target's states alone. Concurrently with the
    target's last product, which is one long read, its short kernels cost next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._under_way = False
        self._read: tuple[Tensor, ...] = ()

    @contextmanager
    def work(self, *read: Tensor) -> Iterator[None]:
        """Inside, launches go to the second stream, after all that the current one has so far.

        The caller calls `join` too, whatever happens between: a capture that the second stream
        takes part in cannot end before. What it reads is kept until then: the current stream owns
        that memory, and would write other results over it.
        """
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._under_way, self._read = True, read
        with torch.cuda.stream(self._stream), apart(self._stream.cuda_stream):
            yield

    def join(self) -> None:
        """What is launched from here on sees that work done.

        Without any, nothing is waited for: a graph that is being captured must not look at a stream
        that has no part in it.
        """
        if self._under_way:
            assert self._stream is not None
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._under_way, self._read = False, ()


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a prompt, and where they go."""

    slot: int
    start: int
    """Tokens of the slot that are there already."""
    tokens: Sequence[int]


@dataclass(frozen=True)
class PrefillShape:
    """What a prefill forward looks like; each is captured once."""

    sequences: int
    count: int
    """Tokens a prompt, padding included."""
    longest: int | None
    """A bound on what a slot holds then; None where attention needs none."""
    drafts: bool
    """Whether the draft cache is updated too."""
    common: bool = True
    """Whether the shape will come again: worth a graph."""


@dataclass(frozen=True)
class Verified:
    """Blocks that the target has read, from which the host chooses."""

    block: Tensor  # [sequences, n]
    states: Tensor  # [sequences * n, hidden], before the last norm: far smaller than logits


@dataclass(frozen=True)
class Pending:
    """Verified blocks whose masks are to come."""

    slots: Tensor  # [sequences]
    block: Tensor  # [sequences, n]
    logits: Tensor  # [sequences, n, vocabulary]
    blocks: Callable[[], Tensor]
    """Waits for the blocks on the host."""

    def drafts(self) -> list[list[int]]:
        """The drafts of each sequence, for which this waits."""
        found: list[list[int]] = self.blocks()[:, 1:].tolist()
        return found


@dataclass(frozen=True)
class Drafted:
    """What a cycle verifies."""

    metadata: AttentionMetadata
    block: Tensor  # [sequences, n]: anchors and drafts
    tree: DraftTree | None = None
    """Whose nodes the block holds; None where it is a chain."""
    drawn_from: Sequence[DraftLogits] = ()
    """What the drafts were drawn from, where some accept rule asks for it."""
    ragged: RaggedBlocks | None = None
    """What of the block is verified; None where all of it is."""

    @cached_property
    def tokens(self) -> Tensor:
        """What the target reads, by its metadata."""
        return self.block if self.ragged is None else self.ragged.pack(self.block)


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """A cycle's slots [sequences], or what `_numbers` gives for a prefill."""
    result: Any
    """What `run_cycle`, `verify` (where the host goes on) or `_run_prefill` gives."""


class ModelRunner:
    """Target and drafter over the same slots. Launches work and never waits for it."""

    def __init__(
        self,
        model: InferenceModel,
        drafter: Drafter | None,
        slots: Slots,
        *,
        graphs: bool,
        pad: bool | None = None,
        chances: AcceptanceModel | None = None,
    ) -> None:
        """With `graphs` work is captured; `pad` alone only pads prompts, which tests want."""
        self.model, self.drafter, self.slots = model, drafter, slots
        self.chances = chances
        """Of drafts, by which sequences verify different numbers of them; None where all do."""
        self._device = slots.device
        self._graphs = graphs
        self.recorder: Any = GraphRecorder() if graphs else None
        self._side_stream = SideStream(slots.device)
        self._defers = slots.device.type == "cpu" and not graphs
        """Whether plain steps leave the draft cache for later; a GPU updates it concurrently."""
        self._deferred: list[tuple[Tensor, ...]] = []
        """Captured states, tokens, slots and starts of plain steps that it does not hold yet."""
        self.deferred_seconds = 0.0
        """What updates with these took since the engine last asked."""
        self._cycles: dict[tuple[int, Plan], Captured] = {}
        self._pad = graphs if pad is None else pad
        self._cheap = _cheap_tokens(model) if slots.device.type == "cuda" else 0
        self._prefills: dict[PrefillShape, Captured] = {}
        self._seen: Counter[PrefillShape] = Counter()
        self._too_large: set[PrefillShape] = set()
        # In place for ever: a captured graph keeps their addresses.
        self._pattern = torch.zeros(LONGEST_PATTERN, dtype=torch.long, device=slots.device)
        self._period = torch.ones(1, dtype=torch.long, device=slots.device)
        self._turn = torch.zeros(1, dtype=torch.long, device=slots.device)
        self.clock: dict[str, float] | None = None
        """Seconds of `draft` and `verify` are added here; for CPUs, where launches are the work."""

    # Cycles ---------------------------------------------------------------------------------------

    def start_cycle(self, slots: Sequence[int], plan: Plan) -> Callable[[], Tensor]:
        """Start a cycle for these slots; what is returned waits for its report."""
        with on_device(self._device):
            if not self._graphs:
                return self.run_cycle(torch.tensor(slots, device=self._device), plan).cpu
            return _read_back(self._replay(slots, plan), len(slots))

    def start_constrained_cycle(self, slots: Sequence[int], plan: Plan) -> Pending:
        """Start a cycle up to where masks are needed; nothing waits for it here."""
        with on_device(self._device):
            places = self.slots.send(torch.tensor(slots))
            verified = self._replay(slots, plan) if self._graphs else self.verify(places, plan)
            block = verified.block[: len(slots)].clone()  # the next replay writes over it
            blocks = _to_host(block, len(slots))
            logits = self.logits(verified.states[: block.numel()]).view(*block.shape, -1)
            return Pending(places, block, logits, blocks)

    def finish_constrained_cycle(
        self, pending: Pending, plan: Plan, masks: DraftMasks
    ) -> Callable[[], Tensor]:
        """Choose at all positions at once and commit; what is returned waits for the report.

        A token of -1 in the report stands where none was left.
        """
        with on_device(self._device):
            slots, block, logits = pending.slots, pending.block, pending.logits
            metadata = AttentionMetadata(slots, self.slots.lengths[slots], block.shape[1])
            judged = self._masked(self._judged(logits, block, metadata, plan), masks)
            chosen = self.draws(slots, plan).choose(judged, metadata.starts)
            reach = None if masks.reach is None else self.slots.send(masks.reach)
            report = self.report(chosen, logits, block, slots, plan, reach=reach)
            return _to_host(_with_none_left(report, chosen, judged), len(report))

    def _masked(self, judged: Tensor, masks: DraftMasks) -> Tensor:
        """Logits [sequences, n, vocabulary] without the tokens that may not follow."""
        packed = self.slots.send(masks.masks)
        return judged.masked_fill(banned_tokens(packed, judged.shape[-1]), -torch.inf)

    def run_hooked_cycle(
        self, slots: Sequence[int], plan: Plan, walk: HookedWalk
    ) -> Callable[[], Tensor]:
        """A cycle whose tokens the walk chooses, which waits for the device; gives its report."""
        with on_device(self._device):
            places = torch.tensor(slots, device=self._device)
            verified = self._replay(slots, plan) if self._graphs else self.verify(places, plan)
            block = verified.block[: len(slots)]
            logits = self.logits(verified.states[: block.numel()]).view(*block.shape, -1)
            starts = self.slots.lengths[places]
            draws = self.draws(places, plan)
            metadata = AttentionMetadata(places, starts, block.shape[1])
            judged = self._judged(logits, block, metadata, plan)
            chosen = walk.choose(judged, block[:, 1:].tolist(), draws, starts)
            return self.report(chosen, logits, block, places, plan).cpu

    def _replay(self, slots: Sequence[int], plan: Plan) -> Any:
        """The result of a captured cycle, for these slots and those that fill up its batch."""
        size = self.size_of(len(slots))
        captured = self._cycles.pop((size, plan), None) or self.capture_cycle(size, plan)
        self._cycles[size, plan] = captured  # the last one used is the last to go
        filled = [*slots, *[self.slots.spare] * (size - len(slots))]
        captured.inputs.copy_(torch.tensor(filled).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.result

    def size_of(self, sequences: int) -> int:
        """The size of the batch that so many sequences run in here."""
        return filled_size(sequences) if self._graphs else sequences

    def capture_cycles(self, sequences: int, plan: Plan, *, fewest: int = 1) -> None:
        """Record a cycle for each size that so many sequences, or fewer, are filled up to."""
        if self._graphs:
            with on_device(self._device):
                for size in reversed(sizes_up_to(sequences)):  # smaller ones fit into what it took
                    if size >= fewest and (size, plan) not in self._cycles:
                        self.capture_cycle(size, plan)

    def capture_cycle(self, size: int, plan: Plan) -> Captured:
        """Record one cycle of this kind; slots in use are not touched."""
        while len(self._cycles) >= MOST_GRAPHS:
            self._forget_oldest()
        spare = self.slots.spare
        slots = torch.full((size,), spare, dtype=torch.long, device=self._device)
        assert self.recorder is not None
        work = self.verify if plan.on_host else self.run_cycle
        graph, result = self.recorder.record(lambda: work(slots, plan))
        captured = Captured(graph, slots, result)
        self._cycles[size, plan] = captured
        return captured

    def _forget_oldest(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # it may still run
        del self._cycles[next(iter(self._cycles))]

    def force(self, accepted: Sequence[int]) -> None:
        """What cycles whose plan says `forced` pretend to accept, one after the other."""
        if not 0 < len(accepted) <= LONGEST_PATTERN:
            raise InputError(
                f"the pattern has {len(accepted)} cycles; expected 1 to {LONGEST_PATTERN}."
            )
        self._pattern[: len(accepted)] = torch.tensor(list(accepted), device=self.slots.device)
        self._period.fill_(len(accepted))
        self._turn.zero_()

    @contextmanager
    def learning_nothing(self) -> Iterator[None]:
        """Cycles inside are measurements: what they accept says nothing of drafts."""
        state = [] if self.chances is None else [self.chances.weights, self.chances.information]
        before = [each.clone() for each in state]
        try:
            yield
        finally:
            for each, old in zip(state, before, strict=True):
                each.copy_(old)

    @torch.no_grad()
    def run_cycle(self, slots: Tensor, plan: Plan) -> Tensor:
        """One cycle: for each sequence the count of accepted drafts, then the tokens chosen.

        Gives [sequences, depth + 2], or what `commit_tree` gives. The first `accepted + 1` of the
        tokens are committed. Where lengths differ a column says how many drafts were verified, and
        one for each place what a budget so large had promised. If tokens are scored, columns of
        `score_columns` follow.
        """
        starts, draws = self.slots.lengths[slots], self.draws(slots, plan)
        try:
            drafted, states = self._draft_and_verify(slots, starts, draws, plan)
            with self._timed("verify"):
                logits = self.model.logits(states).view(*drafted.tokens.shape, -1)
                if drafted.ragged is not None and plan.pads:
                    logits = drafted.ragged.pad(logits)
                chosen, accepted = self.choose(logits, drafted, draws, plan)
        finally:
            self._side_stream.join()
        if drafted.tree is not None:
            return self._report_tree(chosen, logits, drafted, plan)
        lengths = None if drafted.ragged is None else drafted.ragged.lengths
        return self.report(chosen, logits, drafted.block, slots, plan, accepted, lengths=lengths)

    def draws(self, slots: Tensor, plan: Plan) -> Draws:
        """How these slots' sequences choose in such a cycle."""
        return self.slots.draws(
            slots, sampled=plan.sampled, filtered=plan.filtered, uncoupled=plan.uncoupled
        )

    @torch.no_grad()
    def verify(self, slots: Tensor, plan: Plan) -> Verified:
        """A cycle up to where tokens are chosen."""
        starts, draws = self.slots.lengths[slots], self.draws(slots, plan)
        try:
            drafted, states = self._draft_and_verify(slots, starts, draws, plan)
        finally:
            self._side_stream.join()
        return Verified(drafted.block, states.rows)

    def _draft_and_verify(
        self, slots: Tensor, starts: Tensor, draws: Draws, plan: Plan
    ) -> tuple[Drafted, Normed]:
        """Each anchor and its drafts, and the states after each of them.

        The caller joins the side stream.
        """
        with self._timed("draft"):
            drafted = self.draft(slots, starts, draws, plan)
        tokens, metadata = drafted.tokens, drafted.metadata
        drafter = None if plan.alone else self.drafter
        layers = () if drafter is None else drafter.capture_layers
        with self._timed("verify"):
            states, captured = self.model.forward(tokens, metadata, layers)
        if drafter is not None:
            places = {"slots": metadata.slots, "starts": metadata.starts}
            with self._timed("draft"), self._side_stream.work(captured):
                if self._defers and not plan.depth:
                    self._deferred.append((captured, tokens, *places.values()))
                    if sum(len(each) for each, *_ in self._deferred) >= MOST_DEFERRED:
                        self.update_draft_cache()
                elif drafted.tree is None:
                    drafter.update_cache(captured, tokens, **places)
                else:
                    drafter.update_tree(captured, drafted.tree, **places)
        return drafted, states

    @torch.no_grad()
    def update_draft_cache(self) -> None:
        """Let the draft cache hold what plain steps have captured, before it is read or written.

        Each of their tokens goes in as a sequence of one: slots may have any number of them.
        """
        if not self._deferred:
            return
        started = time.perf_counter()
        captured, tokens, slots, starts = map(torch.cat, zip(*self._deferred, strict=True))
        self._deferred.clear()
        assert self.drafter is not None
        self.drafter.update_cache(captured, tokens, slots=slots, starts=starts)
        self.deferred_seconds += time.perf_counter() - started

    def draft(self, slots: Tensor, starts: Tensor, draws: Draws, plan: Plan) -> Drafted:
        """What a cycle of these slots, which hold `starts` tokens, is to verify."""
        anchors = self.slots.anchors[slots]
        if not plan.depth:
            return Drafted(AttentionMetadata(slots, starts, 1), anchors.unsqueeze(1))
        assert self.drafter is not None
        self.update_draft_cache()
        sampler = draws.for_drafts(starts, keep=plan.budget > 0)
        common: dict[str, Any] = {
            "slots": slots, "starts": starts, "depth": plan.depth, "sampler": sampler
        }  # fmt: skip
        if not plan.nodes:
            block = torch.cat(
                (anchors.unsqueeze(1), self.drafter.propose(anchors, **common)), dim=1
            )
            drawn_from = (sampler.kept or []) if plan.uncoupled else []
            if plan.budget:
                # Chances are those of the target's own choice, whatever drafts are chosen with.
                sharing = Sequences(slots, starts, self.slots.spare, draws.temperature)
                assert self.chances is not None
                lengths = self.chances.choose(sampler.kept or [], sharing, plan.budget)
                ragged = RaggedBlocks(lengths, plan.depth + 1)
                return Drafted(ragged.metadata, block, drawn_from=drawn_from, ragged=ragged)
            metadata = AttentionMetadata(slots, starts, block.shape[1])
            return Drafted(metadata, block, drawn_from=drawn_from)
        tree = self.drafter.propose_tree(anchors, nodes=plan.nodes, **common)
        metadata = AttentionMetadata(
            slots,
            starts,
            tree.tokens.shape[1],
            positions=starts.unsqueeze(1) + tree.depths,
            ancestors=tree.ancestors,
            paths=tree.paths,
        )
        return Drafted(metadata, tree.tokens, tree)

    def choose(
        self,
        logits: Tensor,  # [sequences, n, vocabulary]; ragged [tokens, 1, vocabulary]
        drafted: Drafted,
        draws: Draws,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        """The token that each sequence chooses after each token of its block, [sequences, n].

        And how many drafts that accepts [sequences], where comparing does not tell.
        """
        block, metadata, lengths = drafted.block, drafted.metadata, None
        if (ragged := drafted.ragged) is not None:
            if not plan.pads:
                judged = self._judged(logits, None, metadata, plan)
                own = self.draws(metadata.slots, plan)
                return ragged.pad_tokens(own.choose(judged, metadata.starts)), None
            lengths = ragged.lengths.verified
            assert metadata.ragged is not None
            metadata = AttentionMetadata(
                metadata.ragged.slots, metadata.ragged.starts, block.shape[1]
            )
        judged = self._judged(logits, block, metadata, plan)
        if drafted.drawn_from:
            starts, drawn_from = metadata.starts, drafted.drawn_from
            drafts = (block, draws, starts, drawn_from)
            return accept(judged, *drafts, mixed=plan.mixed, lengths=lengths)
        return draws.choose(judged, metadata.starts, positions=metadata.positions), None

    def _judged(
        self,
        logits: Tensor,
        block: Tensor | None,
        metadata: AttentionMetadata,
        plan: Plan,
    ) -> Tensor:
        """The logits with biases, less penalties; where processors may write to them a copy.

        Either is float32. With no block there is one position, right after the prompt.
        """
        slots = metadata.slots
        if plan.biased:
            positions = metadata.positions
            if positions is None:
                steps = torch.arange(logits.shape[1], device=logits.device)
                positions = metadata.starts.unsqueeze(1) + steps
            logits = self.slots.biases.apply(logits, slots, positions)
        if plan.penalised:
            return self.slots.penalties.apply(logits, slots, block, metadata.ancestors)
        return logits.to(torch.float32, copy=True) if plan.hooked else logits

    def report(
        self,
        chosen: Tensor,
        logits: Tensor,
        block: Tensor,
        slots: Tensor,
        plan: Plan,
        accepted: Tensor | None = None,
        *,
        reach: Tensor | None = None,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Accept and commit what was chosen after a block; what `run_cycle` gives.

        `reach` [sequences] are the drafts that can be accepted, where not all can.
        """
        state = self.slots
        reach = reach if lengths is None else lengths.verified
        told = self._pretended(block, reach) if plan.forced else accepted
        report, accepted = commit(chosen, block, slots, state.lengths, state.anchors, told, reach)
        self.model.cache.commit(slots, accepted)
        if plan.penalised:
            state.penalties.count(slots, block, accepted)
        if lengths is not None:
            assert self.chances is not None
            self.chances.learn(lengths, accepted)
            report = torch.cat((report, lengths.columns), dim=1)
        if not plan.scored:
            return report
        return torch.cat((report, score_columns(logits, chosen, ranked=plan.ranked)), dim=1)

    def _report_tree(self, chosen: Tensor, logits: Tensor, drafted: Drafted, plan: Plan) -> Tensor:
        """Walk the trees by what was chosen after their nodes and commit; `run_cycle`'s result."""
        state, tree, metadata = self.slots, drafted.tree, drafted.metadata
        assert tree is not None
        slots, starts = metadata.slots, metadata.starts
        told = self._pretended_path(tree) if plan.forced else None
        where = (slots, state.lengths, state.anchors)
        report, path = commit_tree(chosen, tree, *where, plan.depth, told)
        for cache in (self.model.cache, *(() if self.drafter is None else self.drafter.caches)):
            cache.compact(slots, starts, path)
        if plan.penalised:
            state.penalties.count(slots, tree.tokens.gather(1, path), report[:, 0])
        if not plan.scored:
            return report
        along = path.unsqueeze(2).expand(-1, -1, logits.shape[2])
        tokens = report[:, 1 : plan.depth + 2]
        columns = score_columns(logits.gather(1, along), tokens, ranked=plan.ranked)
        return torch.cat((report, columns), dim=1)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.clock is not None:
            self.clock[part] = self.clock.get(part, 0.0) + time.perf_counter() - start

    def _pretended(self, block: Tensor, reach: Tensor | None = None) -> Tensor:
        """The next count of the pattern for every sequence, [sequences]."""
        count = self._pattern.index_select(0, self._turn.remainder(self._period))
        self._turn.add_(1)
        count = count.clamp(max=block.shape[1] - 1).repeat(len(block))
        return count if reach is None else count.minimum(reach)

    def _pretended_path(self, tree: DraftTree) -> Tensor:
        """The same as nodes on the way to the deepest one, as bits [sequences]."""
        deepest = tree.depths.argmax(dim=1, keepdim=True)
        near = tree.depths <= self._pretended(tree.tokens).unsqueeze(1)
        near = (near.long() << torch.arange(near.shape[1], device=near.device)).sum(dim=1)
        return tree.ancestors.gather(1, deepest).squeeze(1) & near

    # Prefill --------------------------------------------------------------------------------------

    def start_sequences(
        self,
        states: Tensor,  # [sequences, hidden]: those of `prefill`
        slots: Sequence[int],
        plan: Plan,
        *,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        ends: Sequence[Collection[int]],
        walk: HookedWalk | None = None,
        masks: DraftMasks | None = None,
    ) -> Callable[[], Tensor]:
        """Choose each sequence's first token, its anchor; what is returned waits for the report.

        The report is that of a cycle without drafts. With a `walk` the host chooses; `masks` are
        those of grammars.
        """
        state = self.slots
        places = state.open(slots, prompts=prompts, params=params, seeds=seeds, ends=ends)
        draws = self.draws(places, plan)
        logits = self.logits(states).unsqueeze(1)
        starts = state.lengths[places] - 1
        judged = self._judged(logits, None, AttentionMetadata(places, starts, 1), plan)
        if masks is not None:
            judged = self._masked(judged, masks)
        if walk is None:
            chosen = draws.choose(judged, starts)  # [sequences, 1]
        else:
            chosen = walk.choose(judged, [[] for _ in slots], draws, starts)
        state.anchors[places] = chosen[:, 0]
        report = torch.cat((torch.zeros_like(chosen), chosen), dim=1)
        if plan.scored:
            columns = score_columns(logits, chosen, ranked=plan.ranked)
            report = torch.cat((report, columns), dim=1)
        if masks is not None:
            report = _with_none_left(report, chosen, judged)
        return _to_host(report, len(report))

    def copy_prefix(self, source: int, slot: int, count: int, *, drafts: bool) -> None:
        """The first tokens of one slot into another."""
        self.model.cache.copy(source, slot, count)
        if drafts and self.drafter is not None:
            self.update_draft_cache()
            self.drafter.copy_prefix(source, slot, count)

    @torch.no_grad()
    def prefill(self, parts: Sequence[PromptChunk], *, drafts: bool) -> Tensor:
        """The states of each part's last token, [parts, hidden], before the last norm."""
        found: list[Tensor | None] = [None] * len(parts)
        with on_device(self._device):
            for group in self._groups(parts):
                states = self._together([parts[i] for i in group], drafts=drafts)
                if len(group) == len(parts):
                    return states
                for place, index in enumerate(group):
                    found[index] = states[place].clone()  # the next replay writes over it
            return torch.stack([each for each in found if each is not None])

    @torch.no_grad()
    def prefill_scored(
        self, parts: Sequence[PromptChunk], following: Sequence[Sequence[int]], *, drafts: bool
    ) -> tuple[Tensor, list[Callable[[], Tensor]]]:
        """The same, and what waits for each part's `prompt_columns`.

        `following` are the tokens after a part's tokens, fewer where the prompt ends. A few rows of
        logits exist at a time.
        """
        last: list[Tensor] = [torch.empty(0)] * len(parts)
        reports: list[Callable[[], Tensor]] = [lambda: torch.empty(0)] * len(parts)
        with on_device(self._device):
            for group in self._grouped(parts, captured=False):
                own = [parts[index] for index in group]
                count = max(len(part.tokens) for part in own)
                longest = max(part.start for part in own) + count
                shape = PrefillShape(len(own), count, longest, drafts, common=False)
                numbers = torch.tensor(_numbers(own, shape, self.slots.spare)).to(self._device)
                states = self._prompt_states(shape, numbers).view(len(own), count, -1)
                for index, rows in zip(group, states, strict=True):
                    last[index] = rows[len(parts[index].tokens) - 1]
                    reports[index] = self._score_prompt(rows, following[index])
        return torch.stack(last), reports

    def _score_prompt(self, states: Tensor, following: Sequence[int]) -> Callable[[], Tensor]:
        if not following:  # the prompt's last token alone
            return lambda: torch.empty(0)
        tokens = self.slots.send(torch.tensor(following))
        found = [
            prompt_columns(self.logits(rows), own)
            for rows, own in zip(
                torch.split(states[: len(tokens)], AT_ONCE),
                torch.split(tokens, AT_ONCE),
                strict=True,
            )
        ]
        columns = torch.cat(found)
        return _read_back(columns, len(columns)) if self._device.type == "cuda" else columns.cpu

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        model = self.model
        return model.logits(normed(states, model.norm, model.shape.eps))

    @torch.no_grad()
    def capture_prefill(self, sequences: int, *, drafts: bool) -> None:
        """Capture the shapes that up to so many prompts may be padded to.

        Those after many other tokens are left: they are captured when they come again.
        """
        if self.recorder is None:
            return
        shapes = {
            self._prefill_shape(count, length, start, drafts=drafts)
            for count in range(1, min(sequences, PROMPT_COUNTS[-1]) + 1)
            for length in (PROMPT_LENGTHS if count == 1 else SHARED_LENGTHS)
            for start in ((0, 1) if count == 1 else (0, 1, _LONGEST_SHARED - length))
            if 0 <= start <= self.model.cache.capacity - length
        }
        with on_device(self._device):
            # Smaller ones fit into what the largest took.
            for shape in sorted(shapes, key=lambda each: -each.sequences * each.count):
                if shape.common and shape not in self._prefills:
                    self._capture_prefill(shape)

    def _groups(self, parts: Sequence[PromptChunk]) -> list[list[int]]:
        """Parts that share a forward, and none reaching past its slot."""
        if self._pad:  # a few replays cost less than launching the kernels of one forward
            replays = self._grouped(parts, captured=True)
            if len(replays) <= _MOST_REPLAYS:
                return replays
        return self._grouped(parts, captured=False)

    def _grouped(self, parts: Sequence[PromptChunk], *, captured: bool) -> list[list[int]]:
        order = sorted(range(len(parts)), key=lambda i: -len(parts[i].tokens))
        groups: list[list[int]] = []
        longest = start = 0  # of the last group
        for index in order:
            part = parts[index]
            furthest = max(start, part.start)
            if groups and self._share(
                part, len(groups[-1]) + 1, longest=longest, start=furthest, captured=captured
            ):
                groups[-1].append(index)
                start = furthest
            else:
                groups.append([index])
                longest, start = len(part.tokens), part.start
        return [sorted(group) for group in groups]

    def _share(
        self, part: PromptChunk, count: int, *, longest: int, start: int, captured: bool
    ) -> bool:
        """Whether a part goes into a forward, as the last of `count`, none longer than `longest`.

        `start` is the furthest of their starts.
        """
        if part.start + longest > self.model.cache.capacity:
            return False
        if self._prefill_shape(count, longest, start, drafts=False).common:
            return True
        if captured and 2 * longest <= self._cheap:
            return False
        return len(part.tokens) >= _SIMILAR * longest

    def _together(self, parts: Sequence[PromptChunk], *, drafts: bool) -> Tensor:
        count = max(len(part.tokens) for part in parts)
        start = max(part.start for part in parts)
        return self.run_prefill(parts, self._prefill_shape(len(parts), count, start, drafts=drafts))

    @torch.no_grad()
    def run_prefill(self, parts: Sequence[PromptChunk], shape: PrefillShape) -> Tensor:
        """One forward of these parts in a shape that holds them: [parts, hidden]."""
        numbers = torch.tensor(_numbers(parts, shape, self.slots.spare))
        captured = self._prefills.get(shape) or self._worth_capturing(shape)
        if captured is None:
            return self._run_prefill(shape, numbers.to(self._device))[: len(parts)]
        captured.inputs.copy_(numbers.pin_memory(), non_blocking=True)
        captured.graph.replay()
        last: Tensor = captured.result[: len(parts)]
        return last

    def _prefill_shape(
        self, sequences: int, count: int, start: int, *, drafts: bool
    ) -> PrefillShape:
        """The shape in which so many prompts of so many tokens are computed."""
        capacity = self.model.cache.capacity
        drafts = drafts and self.drafter is not None
        exact = PrefillShape(sequences, count, start + count, drafts, common=False)
        lengths, counts = (
            (PROMPT_LENGTHS, (1,)) if sequences == 1 else (SHARED_LENGTHS, PROMPT_COUNTS)
        )
        length = next((n for n in lengths if n >= count), None)
        filled = next((n for n in counts if n >= sequences), None)
        if not self._pad or length is None or filled is None or start + length > capacity:
            return exact
        if filled > 1 and filled * length > self._cheap:
            return exact
        if length <= MAX_TOKENS:
            return PrefillShape(filled, length, None, drafts)
        # After other tokens a few bounds, so that a few graphs serve all starts.
        bound = min(1 << (start + length - 1).bit_length(), capacity) if start else length
        if bound > (_LONGEST_SHARED if filled > 1 and start else _LONGEST_CAPTURED):
            return exact
        return PrefillShape(filled, length, bound, drafts)

    def _worth_capturing(self, shape: PrefillShape) -> Captured | None:
        """A graph for a shape that comes for the second time; capturing takes three forwards."""
        if self.recorder is None or not shape.common or shape in self._too_large:
            return None
        self._seen[shape] += 1
        if self._seen[shape] < 2:
            return None
        try:
            return self._capture_prefill(shape)
        except torch.OutOfMemoryError:  # it can be computed all the same, now and from now on
            self._too_large.add(shape)
            return None

    def _run_prefill(self, shape: PrefillShape, numbers: Tensor) -> Tensor:
        """On a GPU nothing in here waits for the host."""
        even = shape.sequences + shape.sequences % 2
        last = numbers[2 * even : 2 * even + shape.sequences]
        return self._prompt_states(shape, numbers).index_select(0, last)

    def _prompt_states(self, shape: PrefillShape, numbers: Tensor) -> Tensor:
        """The states of all tokens, [sequences * count, hidden]."""
        even = shape.sequences + shape.sequences % 2
        slots, starts = (numbers[i * even : i * even + shape.sequences] for i in range(2))
        tokens = numbers[3 * even :].view(shape.sequences, shape.count)
        ends = numbers[2 * even : 2 * even + shape.sequences]
        metadata = AttentionMetadata(slots, starts, shape.count, longest=shape.longest, ends=ends)
        drafter = self.drafter if shape.drafts else None
        layers = () if drafter is None else drafter.capture_layers
        states, captured = self.model.forward(tokens, metadata, layers)
        if drafter is not None:
            self.update_draft_cache()
            drafter.update_cache(captured, tokens, slots=slots, starts=starts)
        return states.rows

    def _capture_prefill(self, shape: PrefillShape) -> Captured:
        """Capture one forward of this shape in the spare slot; slots in use are not touched."""
        numbers = torch.tensor(_numbers([], shape, self.slots.spare), device=self._device)
        assert self.recorder is not None
        graph, last = self.recorder.record(lambda: self._run_prefill(shape, numbers))
        self._prefills[shape] = Captured(graph, numbers, last)
        return self._prefills[shape]


def _numbers(parts: Sequence[PromptChunk], shape: PrefillShape, spare: int) -> list[int]:
    """All that a forward reads: slots, starts, where each part ends, tokens.

    Each is aligned to 16 bytes, as kernels are compiled for. Prompts that only fill up the shape
    lie in the spare slot.
    """
    odd = [0] * (shape.sequences % 2)
    more = shape.sequences - len(parts)
    slots = [*(part.slot for part in parts), *[spare] * more, *odd]
    starts = [*(part.start for part in parts), *[0] * more, *odd]
    ends = [*(len(part.tokens) for part in parts), *[1] * more]
    last = [index * shape.count + end - 1 for index, end in enumerate(ends)] + odd
    tokens: list[int] = []
    for part in parts:
        # Padded with a token of its own: any number is finite where its own are.
        tokens += [*part.tokens, *[part.tokens[-1]] * (shape.count - len(part.tokens))]
    return [*slots, *starts, *last, *tokens, *[0] * (more * shape.count)]


def _cheap_tokens(model: InferenceModel) -> int:
    """Tokens of a forward that a GPU computes in less time than its kernels take to launch."""
    weights = model.layers[0].nbytes // model.cache.element_size
    return min(_CHEAP_TOKENS, int(_CHEAP_PRODUCTS / weights))


def filled_size(sequences: int) -> int:
    """The size of the batch that a graph for so many sequences has."""
    return next((step for step in BATCH_SIZES if step >= sequences), sequences)


def sizes_up_to(sequences: int) -> list[int]:
    """The sizes of batches that so many sequences, or fewer, run in."""
    return sorted({filled_size(count) for count in range(1, sequences + 1)})


def _with_none_left(report: Tensor, chosen: Tensor, judged: Tensor) -> Tensor:
    """The report with -1 for tokens that were banned like all others there."""
    left = judged.gather(2, chosen.unsqueeze(2)).squeeze(2) > -torch.inf
    tokens = report[:, 1 : chosen.shape[1] + 1]
    tokens.copy_(tokens.where(left, -1))
    return report


def _to_host(report: Tensor, sequences: int) -> Callable[[], Tensor]:
    """What waits for a tensor; a GPU copies it concurrently with what follows."""
    return _read_back(report, sequences) if report.device.type == "cuda" else report.cpu


def _read_back(report: Tensor, sequences: int) -> Callable[[], Tensor]:
    """Copy to the host concurrently with the next cycle; wait only when the copy is wanted."""
    host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    host.copy_(report, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return host[:sequences]

    return wait
