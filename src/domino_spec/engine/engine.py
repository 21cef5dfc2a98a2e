"""The engine: requests come at any time, all advance a step at a time, and leave when they like.

A step is schedule, run, collect: the `Scheduler` says whose prompts are computed and who decodes,
the `ModelRunner` launches that on the device, and what an earlier launch gave is read back.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from domino_spec.decoding import Drafter, RunStats, SamplingParams, TokenScore
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.branches import VerifiedTree
from domino_spec.decoding.processors import no_token_left
from domino_spec.decoding.sequence import ABORTED, SequenceOutput
from domino_spec.decoding.stopping import at_length, end_rules
from domino_spec.engine.block_manager import BlockManager, PageManager
from domino_spec.engine.cache import PAGE, PageTable
from domino_spec.engine.constrained import DraftMasks
from domino_spec.engine.hooks import HookedWalk
from domino_spec.engine.kernels.lengths import MILLION
from domino_spec.engine.kernels.trees import MAX_ROWS
from domino_spec.engine.model_runner import ModelRunner, Pending, Plan, PromptChunk
from domino_spec.engine.models import load_model
from domino_spec.engine.policy import (
    LEAST_RAGGED,
    Batch,
    DepthPolicy,
    Drafts,
    budgeted,
    budgets,
    depths,
    trees,
)
from domino_spec.engine.sampling import unsupported_reason
from domino_spec.engine.scheduler import Chunk, Manager, Scheduler
from domino_spec.engine.scores import ScoreTable, read_prompt_scores
from domino_spec.engine.sizes import (
    Size,
    fitting_size,
    keeps_pages,
    most_sequences,
    no_room_reason,
    packs_by_default,
)
from domino_spec.engine.slots import Slots
from domino_spec.engine.verify_lengths import AcceptanceModel
from domino_spec.errors import InputError, MismatchError
from domino_spec.quantization.memory import give_back_freed
from domino_spec.targets import Target

GPU_CHUNK, CPU_CHUNK = 2048, 128
"""Prompt tokens computed in a step while others decode: these wait no longer than that takes."""
MOST_NODES = 15
"""Nodes of the largest tree that an adaptive engine may choose, where the caller says nothing.

With the anchor they are as many rows as keep every bit of plain decoding on a GPU.
"""
_ALONE = 8192
"""Prompt tokens computed in a step where nothing decodes."""
_GPU_PAIRS, _CPU_PAIRS = 1 << 26, 1 << 24
"""A step's prompt tokens times what each may see, at most: attention's mask holds so many numbers.
"""


@dataclass(frozen=True)
class Launch:
    """Work on the device for some sequences, whose report is still to come."""

    sequences: tuple[Decoded, ...]
    plan: Plan
    report: Callable[[], Tensor]
    prefill: bool = False
    """Whether it gave first tokens; otherwise it was a cycle."""
    taken: list[list[int]] | None = None
    """What its sequences have committed already, where these are hooked."""
    batch: Batch | None = None
    """For what a policy chose the plan, where one did."""


class Engine:
    """Decodes sequences: the reference loop's results, at the speed of the memory."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int | None = None,
        capacity: int | None = None,
        tokens: int | None = None,
        page: int | None = None,
        depth: int | None = None,
        tree: int | None = None,
        adaptive: bool = False,
        lengths: bool = True,
        remeasure: bool = False,
        graphs: bool | None = None,
        ahead: bool | None = None,
        pack: bool | None = None,
        reuse: bool = False,
        chunk: int | None = None,
    ) -> None:
        """`slots` sequences of up to `capacity` tokens each, prompt and output, run at a time.

        Both follow from the requests and the free memory where they are None: the caches then grow,
        between two sequences, to what is asked for. On a GPU caches are in pages of `page` tokens,
        which sequences get as they grow; `tokens` are what all pages hold together, by default all
        that slots could. `depth` is drafts a cycle, by default the drafter's own; `tree` is drafts
        of a tree instead, which is up to `depth` deep. `adaptive` lets each cycle choose fewer, in
        a chain or a tree, by costs that are measured once (anew if `remeasure`) and corrected by
        what cycles take; with `lengths` a batch may verify more drafts of one sequence than of
        another.
        `graphs` captures work in CUDA graphs; `ahead` starts the next cycle before the last one's
        report is read. Both are on where there is a GPU. `pack` keeps a copy of the weights in the
        order in which a CPU multiplies fastest. `reuse` remembers what lies in the caches: a prompt
        that begins as some other sequence did is computed from where they part. `chunk` is how many
        prompt tokens a step computes while others decode.
        """
        check_settings(
            drafter,
            target.device,
            slots=slots,
            capacity=capacity,
            depth=depth,
            tree=tree,
            graphs=graphs,
            chunk=chunk,
            tokens=tokens,
        )
        if reuse and (reason := target.reuse_refusal) is not None:
            raise InputError(f"prompts are to be reused: {reason} Leave `reuse` out.")
        on_gpu = target.device.type == "cuda"
        if drafter is not None:
            drafter = drafter.with_depth(drafter.depth if depth is None else depth)
            drafter = drafter.with_tree(drafter.nodes if tree is None else tree)
            drafter = drafter if drafter.drafts else None
        self.depth = 0 if drafter is None else drafter.depth
        self._adaptive, self._remeasure = adaptive and self.depth > 0, remeasure
        self.nodes = 0
        """Drafts of the largest tree; 0 where only chains are verified."""
        if drafter is not None:
            wanted = drafter.nodes
            target.check_tree(wanted)
            branches = drafter.can_branch and not target.recurrent_modules
            if self._adaptive and tree is None and branches:
                wanted = wanted or MOST_NODES
            self.nodes = drafter.tree_nodes(wanted, self.depth) if wanted else 0
        self._chances: AcceptanceModel | None = None
        if lengths and drafter is not None and drafter.has_logits and self.depth > 1:
            self._chances = AcceptanceModel(self.depth, target.device)
        # A sequence may run a block past its end, and another one started ahead of its report.
        self.margin = 2 * (max(self.depth, self.nodes) + 1) + (
            0 if drafter is None else drafter.lookahead
        )
        self.packs = packs_by_default(target, drafter) if pack is None else pack
        self._source = target
        self._drafts = drafter
        self._fixed = (slots, capacity)
        size = Size(slots, capacity, tokens) if slots and capacity else Size(0, 1)
        self.page = page or (PAGE if keeps_pages(target) else None)
        """Tokens of a page of the caches; None where a slot is one stretch."""
        sizes = self._sizes(size)
        self.target = load_model(target, slots=0, capacity=1, pack=self.packs)
        self.target.resize(**sizes)
        self.target.cache.reserve(self.depth + 1)
        give_back_freed()  # what joining and packing weights left, before a drafter's come on top
        self.drafter = None if drafter is None else drafter.bind(self.target, pack=self.packs)
        give_back_freed()
        if self.drafter is not None:
            self.drafter.resize(**sizes)
        self.size = size
        self.ahead = on_gpu if ahead is None else ahead
        self.policy: DepthPolicy | None = None
        """Chooses the drafts of each cycle; None always takes `depth` and `nodes`."""
        self._graphs = on_gpu if graphs is None else graphs
        self._reuse = reuse
        self._chunk = chunk or (GPU_CHUNK if on_gpu else CPU_CHUNK)
        self._pairs = _GPU_PAIRS if on_gpu else _CPU_PAIRS
        self.lock = RLock()
        """One thread at a time; but a forgotten stream may be closed in the midst of a step."""
        self._prefill_seconds = 0.0
        """What of the last step's time was spent on prompts."""
        self._reported: float | None = None
        """When the last report came, if a cycle alone has run since."""
        self._collected: list[SequenceOutput] = []
        """Outputs of a step that has not ended."""
        self._make_slots(size.slots, sizes["pages"])
        if self._adaptive and size.slots:
            self.adapt()

    def _sizes(self, size: Size) -> dict[str, Any]:
        """Of the caches: one slot more, for those that only fill up a batch."""
        slots, capacity, pages = size.slots + 1, size.capacity + self.margin, None
        if self.page is not None:
            most = -(-capacity // self.page)
            count = size.slots * most
            if size.tokens is not None:
                count = min(count, max(most, -(-size.tokens // self.page)))
            pages = PageTable(
                slots=slots, capacity=capacity, pages=count + 1, page=self.page,
                device=self._source.device,
            )  # fmt: skip
        return {"slots": slots, "capacity": capacity, "pages": pages}

    def _make_slots(
        self, slots: int, pages: PageTable | None, scheduler: Scheduler | None = None
    ) -> None:
        """Everything that belongs to slots; `scheduler` is the one whose queue goes on."""
        self._pages = pages
        self.slots = Slots(slots, self.target.lm_head.shape[0], self.target.device)
        self.runner = ModelRunner(
            self.target, self.drafter, self.slots, graphs=self._graphs, chances=self._chances
        )
        blocks: Manager = BlockManager(slots, reuse=self._reuse)
        if pages is not None:
            reads_next = self.drafter is not None and self.drafter.reads_next
            blocks = PageManager(
                slots, pages, margin=self.margin, reuse=self._reuse, reads_next=reads_next
            )
        self.scheduler = scheduler or Scheduler(blocks, drafts=self.drafts_for)
        self.scheduler.blocks = blocks
        self._launches: deque[list[Launch]] = deque()
        self._kinds: dict[bool, tuple[tuple[Decoded, ...], Plan, Batch]] = {}
        """The last batch with drafts, and without, and what kind of cycle it is."""

    @property
    def has_chances(self) -> bool:
        """Whether a policy may let sequences of a batch verify different numbers of drafts."""
        return self._chances is not None

    def drafts_for(self, sequence: Decoded) -> bool:
        """Whether drafts are made for a sequence; otherwise its draft cache stays empty."""
        return self.drafter is not None and sequence.speculate

    # Requests ---------------------------------------------------------------------------------

    def add_request(self, sequence: Decoded) -> Decoded:
        """Queue a sequence; each `step` from now on may give some of its tokens."""
        check_sequence(sequence, vocab_size=self.target.vocab_size)
        with self.lock:
            if sequence.queued:
                raise InputError("the sequence is in an engine already; make another one.")
            limit = self._fixed[1]
            if limit is not None and sequence.max_length > limit:
                raise InputError(
                    f"the sequence needs {sequence.max_length} tokens ({len(sequence.prompt)} of "
                    f"prompt and {sequence.params.max_new_tokens} new); a slot holds {limit}. "
                    "Shorten it, or make the engine with a larger capacity."
                )
            sequence.queued = True
            self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Decoded) -> None:
        """Take a sequence out at once, waiting or running; harmless for one that has ended."""
        with self.lock:
            if not sequence.finished:
                sequence.finish_reason = ABORTED
            self._leave(sequence)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        eos: Iterable[int] = (),
        speculate: bool = True,
    ) -> list[Decoded]:
        """Decode any number of prompts to their end, as many at a time as the memory holds."""
        count, ends = len(prompts), frozenset(eos)
        given = [params] * count if isinstance(params, SamplingParams) else params
        each = [own.for_sequence(index, count) for index, own in enumerate(given)]
        sequences = [
            Decoded(
                prompt,
                own,
                index=index,
                stop_rules=[*end_rules(own, ends), at_length()],
                eos=ends,
                speculate=speculate,
            )
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        for output in self.stream(sequences):
            if output.error is not None:
                raise output.error
        return sequences

    def stream(
        self,
        sequences: Iterable[Decoded],
        stats: RunStats | None = None,
        *,
        more: Callable[[], Decoded | None] | None = None,
    ) -> Generator[SequenceOutput, None, None]:
        """Decode these sequences, concurrently with all others; their outputs as they come.

        `more` gives further ones while fewer wait than could run: None while there are none, asked
        again after a sequence has ended. A caller that stops listening takes its sequences out.
        """
        own: deque[SequenceOutput] = deque()
        held: dict[Decoded, None] = {}
        if stats is not None:
            stats.engine = "fast"
        ahead = most_sequences(self._source, drafts=self._drafts is not None)
        asks = more is not None
        try:
            with self.lock:
                for sequence in sequences:
                    self._hold(sequence, held, own)
            while held or asks:
                while more is not None and asks and self.waiting < ahead:
                    if (added := more()) is None:
                        asks = False
                        break
                    with self.lock:
                        self._hold(added, held, own)
                if not own:
                    with self.lock:
                        self._step_until(own, stats)
                if not own:
                    return
                output = own.popleft()
                if output.finish_reason is not None or output.error is not None:
                    output.sequence.listener = None
                    held.pop(output.sequence, None)
                    asks = more is not None
                yield output
        finally:
            with self.lock:
                for sequence in held:
                    sequence.listener = None
                    self.abort(sequence)
                if not self.running:
                    self._launches.clear()  # no sequence is left to hear of them

    def _hold(
        self, sequence: Decoded, held: dict[Decoded, None], own: deque[SequenceOutput]
    ) -> None:
        self.add_request(sequence)
        sequence.listener = own.append
        held[sequence] = None

    def _step_until(self, own: deque[SequenceOutput], stats: RunStats | None) -> None:
        """Step until a caller has outputs; those of other callers go to their own streams."""
        while not own and self.busy:
            started = time.perf_counter()
            try:
                outputs = self.step()
            except Exception as error:
                if self.running:  # other callers' sequences among them, which are lost too
                    self._deliver(self.reset(error))
                raise
            self._deliver(outputs)
            if stats is not None:
                stats.spend("prefill", self._prefill_seconds)
                stats.spend("whole", time.perf_counter() - started - self._prefill_seconds)

    @staticmethod
    def _deliver(outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            if output.sequence.listener is not None:
                output.sequence.listener(output)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have, prompt and output."""
        return self.size.capacity

    @property
    def cache_bytes(self) -> int:
        """What its caches take."""
        own = self.target.cache.nbytes
        return own if self.drafter is None else own + self.drafter.cache_bytes

    @property
    def running(self) -> int:
        """Sequences in slots, those still in prefill among them."""
        return len(self.scheduler.running)

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at a time."""
        return self.slots.count

    @property
    def cache_usage(self) -> float:
        """The share of the caches that sequences hold."""
        return self.scheduler.blocks.usage

    @property
    def waiting(self) -> int:
        """Sequences without a slot yet."""
        return len(self.scheduler.waiting)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or runs, or a report is still to come."""
        return bool(self.running or self.waiting or self._launches)

    # A step -----------------------------------------------------------------------------------

    # A caller's inference mode must not make tensors that later steps may not write to.
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[SequenceOutput]:
        """Schedule, run, collect: what some of the sequences committed.

        On a GPU the report of the last step's cycle is read while this step's runs. A sequence
        whose own rules raise leaves with that error; all others keep what they committed.
        """
        with self.lock:
            if not self.running:
                self._reported = None  # it was idle meanwhile
            failed = self._grow()
            self._adapt_if_idle()
            self._admit()
            plan = self.scheduler.schedule(
                budget=self._chunk, alone=max(_ALONE, self._chunk), pairs=self._pairs
            )
            if self._pages is not None:
                self.runner.update_draft_cache()  # while slots have the pages that it is for
                self._pages.send()
            started = time.perf_counter()
            first = self._start_prefill(plan.prefill)
            self._prefill_seconds = time.perf_counter() - started
            # Those with a grammar first: the others run while the host makes their masks.
            pending = self._start_constrained([s for s in plan.decode if s.params.constrained])
            launched = self._start_cycles(
                [s for s in plan.decode if not s.params.constrained and not s.params.hooked]
            )
            # First tokens before the cycle that follows them, which may still run.
            started = time.perf_counter()
            outputs = self._collected
            outputs += _failed(failed)
            for launch in first:
                outputs += self._collect(launch)
            self._prefill_seconds += time.perf_counter() - started
            # Hooks look at all that was committed: these cycles are collected at once.
            hooked = [s for s in plan.decode if s.params.hooked and not s.finished]
            for launch in self._start_cycles(hooked):
                outputs += self._collect(launch)
            collected = [launch for launches in self._launches for launch in launches]
            self._launches.clear()
            for launch in collected:
                outputs += self._collect(launch)
            # Masks follow all that was committed: the last step's cycle was collected by now.
            launched += self._finish_constrained(pending)
            outputs += self._take_out_failed(plan.decode)
            if self.ahead and launched:  # they stay on their way while another step follows
                self._launches.append(launched)
            else:
                for launch in launched:
                    outputs += self._collect(launch)
                collected += launched
            self._time(collected, alone=not (plan.prefill or hooked or pending))
            self._collected = []
            return outputs

    def _time(self, launches: Sequence[Launch], *, alone: bool) -> None:
        """Tell the policy what a cycle took: the time since the last report, if all was its own.

        Drafts do not pay for updates that plain steps before them had deferred.
        """
        before, self._reported = self._reported, time.perf_counter() if alone else None
        deferred, self.runner.deferred_seconds = self.runner.deferred_seconds, 0.0
        if before is None or self._reported is None or self.policy is None or len(launches) != 1:
            return
        plan, batch = launches[0].plan, launches[0].batch
        if batch is not None:
            drafts = Drafts(plan.depth, plan.nodes, plan.budget)
            spent = self._reported - before - (deferred if plan.depth else 0.0)
            self.policy.observe(batch, drafts, spent)

    def _admit(self) -> None:
        for sequence, found in self.scheduler.admit(self.capacity):
            sequence.begin()
            if found.source != found.slot:
                drafts = self.drafts_for(sequence)
                self.runner.copy_prefix(found.source, found.slot, found.reused, drafts=drafts)

    def _start_prefill(self, chunks: Sequence[Chunk]) -> list[Launch]:
        launches = []
        for drafts, scored in itertools.product((True, False), (False, True)):
            own = [
                chunk
                for chunk in chunks
                if self.drafts_for(chunk.sequence) is drafts and chunk.scored is scored
            ]
            if not own:
                continue
            parts = [_prompt_chunk(chunk) for chunk in own]
            if scored:
                following = [
                    chunk.sequence.prompt[chunk.start + 1 : chunk.start + 1 + chunk.count]
                    for chunk in own
                ]
                states, reports = self.runner.prefill_scored(parts, following, drafts=drafts)
                for chunk, report in zip(own, reports, strict=True):
                    chunk.sequence.prompt_reports.append(report)
            else:
                states = self.runner.prefill(parts, drafts=drafts)
            for chunk in own:
                chunk.sequence.computed += chunk.count
            for hooked in (False, True):
                whole = [
                    place
                    for place, chunk in enumerate(own)
                    if chunk.last and chunk.sequence.params.hooked is hooked
                ]
                if not whole:
                    continue
                some = len(whole) < len(own)
                last = states[self.slots.send(torch.tensor(whole))] if some else states
                sequences = tuple(own[place].sequence for place in whole)
                launches.append(self._start_sequences(sequences, last, drafts=drafts))
        return launches

    def _start_sequences(
        self, sequences: tuple[Decoded, ...], states: Tensor, *, drafts: bool
    ) -> Launch:
        """First tokens of sequences whose prompts end in these states [sequences, hidden]."""
        plan = self._plan([s.params for s in sequences], 0, alone=not drafts)
        walk = HookedWalk(sequences) if plan.hooked else None
        masks = DraftMasks(sequences, [[] for _ in sequences]) if plan.constrained else None
        report = self.runner.start_sequences(
            states,
            [_slot(sequence) for sequence in sequences],
            plan,
            prompts=[sequence.prompt for sequence in sequences],
            params=[sequence.params for sequence in sequences],
            seeds=[sequence.seed for sequence in sequences],
            ends=[sequence.end_ids for sequence in sequences],
            walk=walk,
            masks=masks,
        )
        taken = None if walk is None else walk.taken
        return Launch(sequences, plan, report, prefill=True, taken=taken)

    def _start_cycles(self, sequences: Sequence[Decoded]) -> list[Launch]:
        """Cycles of sequences that are all hooked, or none of which is."""
        launches = []
        for own, plan, batch in self._planned(sequences):
            slots = [_slot(s) for s in own]
            if plan.hooked:
                walk = HookedWalk(own)
                report = self.runner.run_hooked_cycle(slots, plan, walk)
                launches.append(Launch(own, plan, report, taken=walk.taken))
            else:
                report = self.runner.start_cycle(slots, plan)
                launches.append(Launch(own, plan, report, batch=batch))
        return launches

    def _start_constrained(
        self, sequences: Sequence[Decoded]
    ) -> list[tuple[tuple[Decoded, ...], Plan, Pending]]:
        """Cycles of sequences with a grammar, up to where masks are needed."""
        return [
            (own, plan, self.runner.start_constrained_cycle([_slot(s) for s in own], plan))
            for own, plan, _ in self._planned(sequences)
        ]

    def _finish_constrained(
        self, cycles: Iterable[tuple[tuple[Decoded, ...], Plan, Pending]]
    ) -> list[Launch]:
        """Walk the drafts through the grammars, wait once for each cycle, and let it go on."""
        return [
            Launch(own, plan, self.runner.finish_constrained_cycle(
                pending, plan, DraftMasks(own, pending.drafts())
            ))
            for own, plan, pending in cycles
        ]  # fmt: skip

    def _take_out_failed(self, sequences: Iterable[Decoded]) -> list[SequenceOutput]:
        """Sequences whose grammar failed, which have no report to come."""
        failed = [s for s in sequences if s.queued and s.error is not None]
        for sequence in failed:
            self._leave(sequence)
        return _failed(failed)

    def _planned(
        self, sequences: Sequence[Decoded]
    ) -> Iterator[tuple[tuple[Decoded, ...], Plan, Batch | None]]:
        """A cycle for those with drafts and one for those without; for what a policy chose it."""
        sequences = sorted(sequences, key=_slot)  # a CPU attends over neighbouring slots at once
        for drafts in (True, False):
            own = tuple(s for s in sequences if self.drafts_for(s) is drafts)
            if not own:
                continue
            plan, batch = self._kind_of(own, drafts=drafts)
            if self.policy is not None and drafts:
                plan = replace(plan, **self.policy.choose(batch)._asdict())
            yield own, plan, batch if self.policy is not None and drafts else None

    def _kind_of(self, sequences: tuple[Decoded, ...], *, drafts: bool) -> tuple[Plan, Batch]:
        """The deepest cycle of these sequences; found once for as long as they are the same."""
        if (known := self._kinds.get(drafts)) is None or known[0] != sequences:
            params = [sequence.params for sequence in sequences]
            plan = self._plan(params, self.depth, self.nodes, alone=not drafts)
            drawn = sum(each.samples for each in params) / len(params)
            size = self.runner.size_of(len(params))
            timed = not plan.on_host
            ragged = self.has_chances and len(params) >= LEAST_RAGGED and timed
            batch = Batch(size, plan.kinds, drawn, trees=plan.nodes > 0, ragged=ragged, timed=timed)
            known = self._kinds[drafts] = (sequences, plan, batch)
        return known[1:]

    def _plan(
        self, params: Sequence[SamplingParams], depth: int, nodes: int = 0, *, alone: bool
    ) -> Plan:
        alone = alone and self.drafter is not None
        return Plan.of(params, 0 if alone else depth, 0 if alone else nodes, alone=alone)

    def _collect(self, launch: Launch) -> list[SequenceOutput]:
        """Wait for a report and commit what it says, up to each sequence's end."""
        report, places = launch.report(), launch.plan.depth + 1
        nodes, budget = launch.plan.nodes, launch.plan.budget
        width = places + 1 + (places - 1 + 2 * (nodes + 1) if nodes else 0)
        width += places if budget else 0
        table = ScoreTable(report[:, width:], places) if launch.plan.scored else None
        rows = report[:, :width].tolist()
        outputs = []
        if budget and self.policy is not None and launch.batch is not None:
            promised = [each / MILLION for each in rows[0][places + 2 :]]
            accepted = sum(row[0] for row in rows) / len(rows)
            self.policy.record_lengths(launch.batch, promised, budget, accepted)
        for index, (sequence, row) in enumerate(zip(launch.sequences, rows, strict=True)):
            if sequence.finished and launch.taken is None:
                continue  # it ended, or was aborted, after this was started
            accepted, tokens = row[0], row[1 : row[0] + 2]
            top = sequence.params.logprobs
            scores = None
            if table is not None and top is not None:
                scores = table.of(index, tokens=len(tokens), top=top)
            tree = None
            if nodes:
                own = row[places + 1 :]
                path, parents = own[:accepted], own[-nodes - 1 :]
                tree = VerifiedTree(own[places - 1 : places + nodes], parents, path)
            if launch.prefill:
                self._collect_prompt(sequence)
            else:
                sequence.cycles += 1
                if self.policy is not None and launch.plan.depth and not budget:
                    sampled = sequence.params.samples
                    if tree is None:
                        self.policy.record(accepted, launch.plan.depth, sampled=sampled)
                    else:
                        self.policy.record_tree(tree.path, tree.parents, sampled=sampled)
            if launch.taken is not None:
                taken = tuple(launch.taken[index])
            else:
                taken = self._take(sequence, tokens)
            accepted, drafts = min(accepted, len(taken)), 0
            if not launch.prefill and sequence.error is None:
                deep, ranks = row[places + 1] if budget else launch.plan.depth, None
                if tree is not None:
                    deep, ranks = tree.depth, tree.ranks[:accepted]
                drafts = sequence.end_cycle(len(taken), accepted, deep, ranks)
            outputs.append(
                SequenceOutput(
                    sequence,
                    taken,
                    accepted,
                    sequence.cycles,
                    sequence.finish_reason,
                    None if scores is None else scores[: len(taken)],
                    drafts,
                    sequence.error,
                    tree,
                )
            )
            if sequence.finished:
                self._leave(sequence)
        return outputs

    @staticmethod
    def _collect_prompt(sequence: Decoded) -> None:
        """Scores of the prompt, where the sequence wants them."""
        top = sequence.params.prompt_logprobs
        if top is None:
            return
        found: list[TokenScore | None] = [None]
        for report in sequence.prompt_reports:
            if len(columns := report()):
                found += read_prompt_scores(columns, top)
        sequence.prompt_scores, sequence.prompt_reports = found, []

    @staticmethod
    def _take(sequence: Decoded, tokens: Sequence[int]) -> tuple[int, ...]:
        """Commit tokens; a sequence whose stop rules raise ends with that error."""
        try:
            if -1 not in tokens:
                return sequence.take(tokens)
            taken = sequence.take(tokens[: tokens.index(-1)])
            if not sequence.finished:
                sequence.error = no_token_left(len(sequence.prompt) + len(sequence.output))
            return taken
        except Exception as error:
            sequence.error = error
            return ()

    def _leave(self, sequence: Decoded) -> None:
        if sequence.queued:
            sequence.queued = False
            self.scheduler.remove(sequence)
            self._kinds.clear()

    # Sizes ------------------------------------------------------------------------------------

    def no_room_reason(self, sequences: Sequence[Decoded]) -> str | None:
        """Why the memory does not hold one of these; None if it does."""
        return no_room_reason(self, self._source, self._drafts, sequences)

    def _grow(self) -> list[Decoded]:
        """Larger caches, where the next sequence, or all that wait, need them and none runs.

        Sequences that the memory does not hold, not even one at a time, end with that error.
        """
        if (all(self._fixed) and self.slots.count) or self.running or not self.waiting:
            return []
        waiting = list(self.scheduler.waiting)
        longest = max(sequence.max_length for sequence in waiting)
        if self.slots.count >= len(waiting) and self.capacity >= longest:
            return []
        size = fitting_size(self, self._source, self._drafts, waiting, self._fixed)
        if size is not None and size != self.size:
            self.resize(slots=size.slots, capacity=size.capacity, tokens=size.tokens)
        failed = []
        if self.capacity < longest or not self.slots.count:
            reasons = {sequence: self.no_room_reason([sequence]) for sequence in waiting}
            failed = [sequence for sequence in waiting if reasons[sequence]] or waiting
            for sequence in failed:
                reason = reasons[sequence] or "its caches could not be made"
                sequence.error = torch.OutOfMemoryError(f"the engine has no room: {reason}.")
                self._leave(sequence)
        return failed

    def _adapt_if_idle(self) -> None:
        """Measuring writes to slots, so it waits for an idle engine; plain sequences need none."""
        if not self._adaptive or self.running or not self.slots.count:
            return
        if any(self.drafts_for(sequence) for sequence in self.scheduler.waiting):
            self.adapt()

    def adapt(self) -> None:
        """Measure what cycles cost here, once a machine, and choose each cycle's depth by that."""
        from domino_spec.engine.calibration import adapt_depth, measured_sizes

        if self.policy is None or not self.policy.knows(max(measured_sizes(self.slots.count))):
            adapt_depth(self, anew=self._remeasure)
            self._remeasure = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def resize(self, *, slots: int, capacity: int, tokens: int | None = None) -> None:
        """Other caches while nothing runs: weights stay, graphs are captured anew."""
        if self.running:
            raise InputError(f"{self.running} sequences are running; wait for them to end.")
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)  # a cycle that was not waited for may run
        self._drop_slots()  # all of them, before anything is taken
        size = Size(slots, capacity, tokens)
        sizes = self._sizes(size)
        try:
            self.target.resize(**sizes)
            if self.drafter is not None:
                self.drafter.resize(**sizes)
        except BaseException:
            self._drop_slots()
            raise
        self._make_slots(slots, sizes["pages"], self.scheduler)
        self.size = size

    def _drop_slots(self) -> None:
        self.size = Size(0, self.size.capacity)
        self._make_slots(0, None, self.scheduler)
        self.target.cache.free()
        if self.drafter is not None:
            self.drafter.free()

    def reset(self, error: Exception) -> list[SequenceOutput]:
        """After a step that failed: all running sequences end with the error, caches are new.

        Gives what the step had collected before it failed, then the sequences that are lost.
        """
        with self.lock:
            lost = list(self.scheduler.running)
            for sequence in lost:
                sequence.error = error
                sequence.slot, sequence.queued = None, False
            self.scheduler.running.clear()
            size = self.size
            self.resize(slots=size.slots, capacity=size.capacity, tokens=size.tokens)
            outputs, self._collected = self._collected, []
            return outputs + _failed(lost)

    def forget(self) -> None:
        """Reuse nothing of what sequences that left have computed; for those who write to slots."""
        self.scheduler.blocks.forget()

    def capture(self, sequences: int, params: SamplingParams, *, speculate: bool = True) -> None:
        """Capture all that up to so many such sequences could need, where graphs are on.

        Otherwise each is captured at its first use, inside a request.
        """
        drafts = speculate and self.drafter is not None
        self.runner.capture_prefill(sequences, drafts=drafts)
        chosen = [(self.depth, self.nodes)]
        if self.policy is not None and drafts:
            chosen = [(depth, 0) for depth in depths(self.depth)]
            chosen += [(min(nodes, self.depth), nodes) for nodes in trees(self.nodes)]
        for depth, nodes in chosen:
            plan = self._plan([params], depth, nodes, alone=not drafts)
            if plan.nodes == nodes or len(chosen) == 1:  # not a chain instead of a tree
                most = MAX_ROWS if nodes and self.policy is not None else sequences
                self.runner.capture_cycles(min(sequences, most), plan)
        if self.policy is not None and drafts and self.has_chances and not plan.on_host:
            chain = self._plan([params], self.depth, alone=False)
            for budget in budgets(self.depth):
                ragged = replace(chain, **budgeted(budget, self.depth)._asdict())
                self.runner.capture_cycles(sequences, ragged, fewest=LEAST_RAGGED)


def check_settings(
    drafter: Drafter | None,
    device: torch.device,
    *,
    slots: int | None,
    capacity: int | None,
    depth: int | None,
    tree: int | None = None,
    graphs: bool | None,
    chunk: int | None,
    tokens: int | None = None,
) -> None:
    """Refuse an engine that could not run as it is asked to."""
    sizes = {"slots": slots, "capacity": capacity, "chunk": chunk, "tokens": tokens}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; expected 1 or more.")
    if tokens is not None and (capacity is None or tokens < capacity):
        raise InputError(
            f"all pages together hold {tokens} tokens, and one slot {capacity}; expected a "
            "capacity, and no fewer tokens than that."
        )
    if graphs and device.type != "cuda":
        raise InputError(f"graphs are CUDA's and the target is on {device}; leave graphs out.")
    if drafter is None or not drafter.drafts:
        for name, value in (("depth", depth), ("tree", tree)):
            if value:
                raise InputError(f"{name} is {value} without a drafter; leave it out, or give one.")
        return
    if (reason := drafter.unsupported_reason(device)) is not None:
        raise MismatchError(f"{reason}. Use the reference loop.")


def check_sequence(sequence: Decoded, *, vocab_size: int) -> None:
    """Refuse a sequence that has begun elsewhere, or that needs the reference loop."""
    reason = unsupported_reason(sequence)
    sequence.params.check_vocabulary(vocab_size)
    if sequence.sampler is not None:
        reason = "it chooses its tokens by a sampler of the reference loop"
    if reason is not None:
        raise InputError(
            f"the sequence cannot run on the engine: {reason}. Decode it with the reference loop."
        )
    if sequence.params.min_tokens and len(sequence.end_ids) >= vocab_size:
        raise InputError(
            f"min_tokens is {sequence.params.min_tokens}, but every token of the vocabulary ends "
            "the sequence; name fewer stop_token_ids."
        )
    if sequence.output or sequence.finished:
        raise InputError(
            f"the sequence has {len(sequence.output)} tokens already; the engine begins with a "
            "prompt. Make a new sequence whose prompt holds them."
        )
    if not sequence.prompt:
        raise InputError("the prompt is empty; expected at least one token.")
    if min(sequence.prompt) < 0 or max(sequence.prompt) >= vocab_size:
        # A kernel would read past the embedding's end.
        raise InputError(
            f"the prompt holds ids from {min(sequence.prompt)} to {max(sequence.prompt)}; the "
            f"target knows 0 to {vocab_size - 1}. Was it made with another tokenizer?"
        )


def _failed(sequences: Iterable[Decoded]) -> list[SequenceOutput]:
    return [
        SequenceOutput(sequence, (), 0, sequence.cycles, None, error=sequence.error)
        for sequence in sequences
    ]


def _prompt_chunk(chunk: Chunk) -> PromptChunk:
    sequence, end = chunk.sequence, chunk.start + chunk.count
    return PromptChunk(_slot(sequence), chunk.start, sequence.prompt[chunk.start : end])


def _slot(sequence: Decoded) -> int:
    assert sequence.slot is not None
    return sequence.slot
