"""The reference loop: propose, verify, commit. Every faster path is tested against this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from domino_spec.decoding.branches import Branches, VerifiedTree, batch_branches
from domino_spec.decoding.drafter import Drafter, SequenceSampler
from domino_spec.decoding.sampling import DraftDistribution, make_sampler
from domino_spec.decoding.sequence import Sequence as Decoded
from domino_spec.decoding.sequence import SequenceOutput, TokenScore, token_scores
from domino_spec.decoding.stats import RunStats, Stopwatch
from domino_spec.drafter.tree import DraftTree, chain
from domino_spec.errors import InputError
from domino_spec.targets import Target, TargetCache

_SCORED_AT_ONCE = 64
"""Prompt tokens whose logits exist at a time: those of a whole prompt would fill the memory."""


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter | None,
    sequences: Sequence[Decoded],
    stats: RunStats | None = None,
) -> Iterator[SequenceOutput]:
    """Decode all sequences to their end, yielding what each commits as it is committed.

    A sequence whose `finish_reason` the caller sets in between is dropped. Without a drafter each
    cycle is a step of plain decoding.
    """
    stats = RunStats() if stats is None else stats
    watch = Stopwatch(stats, target.device)
    sequences = list(sequences)
    images = sum(bool(sequence.multimodal_inputs) for sequence in sequences)
    if images and len(sequences) > 1:
        raise InputError(
            f"{images} of {len(sequences)} sequences have images in their prompts, whose prefill "
            "is not padded; decode each of them by itself."
        )
    for sequence in sequences:
        if sequence.sampler is None:
            sequence.sampler = make_sampler(sequence)
    drafting = _Drafting(target, drafter, sequences)
    cache = target.new_cache(len(sequences))

    with watch.stage("prefill"):
        outputs = _prefill(target, drafting, cache, sequences)
    cycle = 0
    while True:
        yield from outputs
        with watch.stage("other"):
            going = [index for index, sequence in enumerate(sequences) if not sequence.finished]
            if going and len(going) < len(sequences):
                cache.select(going)
                drafting.select(going)
            sequences = [sequences[index] for index in going]
        if not sequences:
            return
        cycle += 1
        depth = min(drafting.depth, max(sequence.remaining for sequence in sequences) - 1)

        with watch.stage("draft"):
            sampler = SequenceSampler(sequences)
            anchors = torch.tensor([[sequence.anchor] for sequence in sequences])
            trees, owners, block = batch_branches(drafting.tree(anchors, depth, sampler))
            branched = len(owners) > len(sequences)
            if branched:
                cache.select(owners)
        with watch.stage("verify"):
            lasts = [sequences[owner].last_position for owner in owners]
            output = target.forward(
                block,
                cache,
                capture_layers=drafting.capture_layers,
                last_positions=lasts,
                rollback=block.shape[1] > 1,
            )
        with watch.stage("other"):
            outputs, ends = _commit(
                sequences, output.logits, trees, sampler.distributions, cycle, stats
            )
            kept = [each.accepted + 1 for each in outputs]  # the anchor and accepted drafts
            rows = [tree.place(end)[0] for tree, end in zip(trees, ends, strict=True)]
            counts = [1] * len(owners)
            for row, count in zip(rows, kept, strict=True):
                counts[row] = count
            cache.commit(counts)
            captured = output.captured
            if branched:
                cache.select(rows)
                captured = None if captured is None else captured[rows]
        with watch.stage("draft"):
            drafting.update(captured, block[rows], kept)


class _Drafting:
    """A drafter bound to the target for one run: sequence i of the call has slot i."""

    def __init__(
        self, target: Target, drafter: Drafter | None, sequences: Sequence[Decoded]
    ) -> None:
        self._drafter = None if drafter is None or not drafter.drafts else drafter.bind(target)
        self._slots = list(range(len(sequences)))
        self._lengths = [0] * len(sequences)
        self.depth = 0
        self.capture_layers: Sequence[int] = ()
        if self._drafter is not None:
            target.check_tree(self._drafter.nodes)
            self.depth = self._drafter.depth
            self.capture_layers = self._drafter.capture_layers
            longest = max(sequence.max_length for sequence in sequences)
            capacity = longest + self.depth + 1 + self._drafter.lookahead
            self._drafter.resize(slots=len(sequences), capacity=capacity)

    def select(self, going: Sequence[int]) -> None:
        """Only these sequences go on, in this order."""
        self._slots = [self._slots[index] for index in going]
        self._lengths = [self._lengths[index] for index in going]

    def tree(self, anchors: Tensor, depth: int, sampler: SequenceSampler) -> DraftTree:
        """Each anchor and its drafts; a chain where the drafter drafts chains."""
        if self._drafter is None or not depth:
            return chain(anchors)
        drafter, first = self._drafter, anchors[:, 0].to(self._drafter.device)
        common: dict[str, Any] = {**self._places(), "depth": depth, "sampler": sampler}
        if drafter.nodes and sampler.can_branch:
            return drafter.propose_tree(first, nodes=drafter.nodes, **common)
        drafts = drafter.propose(first, **common)
        return chain(torch.cat((anchors, drafts.to(anchors.device)), dim=1))

    def update(self, captured: Tensor | None, tokens: Tensor, kept: Sequence[int]) -> None:
        """Tell the drafter what the target read; the first `kept[i]` tokens of i stay."""
        if self._drafter is not None:
            device = self._drafter.device
            states = torch.empty(0, device=device) if captured is None else captured.flatten(0, 1)
            self._drafter.update_cache(states, tokens.to(device), **self._places())
        self._lengths = [a + b for a, b in zip(self._lengths, kept, strict=True)]

    def _places(self) -> dict[str, Tensor]:
        assert self._drafter is not None
        places = torch.tensor([self._slots, self._lengths], device=self._drafter.device)
        return {"slots": places[0], "starts": places[1]}


def _prefill(
    target: Target, drafting: _Drafting, cache: TargetCache, sequences: Sequence[Decoded]
) -> list[SequenceOutput]:
    """Read the prompts and choose each sequence's first token, its first anchor."""
    for sequence in sequences:
        if (top := sequence.params.prompt_logprobs) is not None:
            sequence.prompt_scores = prompt_scores(target, sequence.prompt, top)
    lengths = [len(sequence.prompt) for sequence in sequences]
    # Padding goes after the prompt, where causal attention keeps it out of sight.
    prompts = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    for index, sequence in enumerate(sequences):
        prompts[index, : lengths[index]] = torch.tensor(sequence.prompt)
    lasts = [length - 1 for length in lengths]
    output = target.forward(
        prompts,
        cache,
        capture_layers=drafting.capture_layers,
        keep=lasts,
        rollback=len(set(lengths)) > 1,  # of the padding
        multimodal_inputs=sequences[0].multimodal_inputs,  # such a sequence is alone
    )
    columns = [sorted(set(lasts)).index(last) for last in lasts]
    logits = output.logits[torch.arange(len(sequences)), columns].unsqueeze(1)
    count = len(sequences)
    nothing = [Branches([sequence.prompt[-1]], [0], i) for i, sequence in enumerate(sequences)]
    outputs, _ = _commit(sequences, logits, nothing, [None] * count, 0, RunStats())
    cache.commit(lengths)
    drafting.update(output.captured, prompts, lengths)
    return outputs


def prompt_scores(target: Target, prompt: Sequence[int], top: int) -> list[TokenScore | None]:
    """Scores of a prompt's tokens, in a pass of its own; its first token has none."""
    cache, found = target.new_cache(1), list[TokenScore | None]([None])
    for start in range(0, len(prompt) - 1, _SCORED_AT_ONCE):
        chunk = prompt[start : start + _SCORED_AT_ONCE]
        logits = target.forward(torch.tensor([chunk]), cache, rollback=False).logits[0]
        cache.commit([len(chunk)])
        following = prompt[start + 1 : start + 1 + len(chunk)]
        logprobs = logits[: len(following)].float().log_softmax(dim=-1)
        found += token_scores(logprobs, following, top, ranked=True)
    return found


def _commit(
    sequences: Sequence[Decoded],
    logits: Tensor,  # [rows, n, vocabulary]
    trees: Sequence[Branches],
    distributions: Sequence[Sequence[DraftDistribution] | None],
    cycle: int,
    stats: RunStats,
) -> tuple[list[SequenceOutput], list[int]]:
    """Let each sequence walk its verified tree and keep what plain decoding would have chosen.

    Gives the last accepted node of each tree too.
    """
    # One transfer serves every sequence that needs no more than an argmax.
    samplers = [sequence.sampler for sequence in sequences]
    plain = [sampler is not None and sampler.plain for sampler in samplers]
    argmax = logits.argmax(dim=-1).tolist() if any(plain) else None
    outputs, ends = [], []
    for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        before, wanted = len(sequence.output), sequence.params.logprobs
        # Before the walk: a processor may write into the logits it is given.
        raw = None
        if wanted is not None:
            rows = slice(tree.first_row, tree.first_row + len(tree.paths))
            raw = logits[rows].float().log_softmax(dim=-1)
        own = argmax if plain[index] else None
        path = _walk(sequence, logits, tree, distributions[index], own)
        verified = VerifiedTree(tree.tokens, tree.parents, path)
        tokens = tuple(sequence.output[before:])
        scores, accepted, end = None, len(path), path[-1] if path else 0
        if raw is not None and wanted is not None:
            scores = token_scores(raw[tree.place(end)[0] - tree.first_row], tokens, wanted)
        drafted = 0
        if cycle:
            sequence.cycles = cycle
            ranks = verified.ranks
            drafted = sequence.end_cycle(len(tokens), accepted, verified.depth, ranks)
            if sequence.run is not stats:
                stats.acceptance.record(
                    drafts=drafted, accepted=accepted, committed=len(tokens), ranks=ranks
                )
        reason = sequence.finish_reason
        shown = verified if len(tree.paths) > 1 else None
        outputs.append(
            SequenceOutput(sequence, tokens, accepted, cycle, reason, scores, drafted, tree=shown)
        )
        ends.append(end)
    return outputs, ends


def _walk(
    sequence: Decoded,
    logits: Tensor,  # [rows, n, vocabulary]
    tree: Branches,
    drawn_from: Sequence[DraftDistribution] | None,
    argmax: Sequence[Sequence[int]] | None,  # of the logits
) -> list[int]:
    """Walk the verified tree as plain decoding would; the accepted nodes, in order.

    Each position is processed once, in order, seeing only committed tokens, and the walk ends at
    the first token that is not an accepted draft or that stops the sequence. Drafts that were drawn
    are a chain.
    """
    sampler, path, node = sequence.sampler, list[int](), 0
    assert sampler is not None
    if drawn_from and sampler.rule == "block":
        drafts = tree.tokens[1:]
        accepted = _walk_block(sequence, logits[tree.first_row], drafts, drawn_from)
        return list(range(1, accepted + 1))
    start = sequence.anchor_position
    while True:
        row, place = tree.place(node)
        if argmax is not None:
            token = argmax[row][place]
            child = tree.child(node, token)
        else:
            own = logits[row, place]
            scores = sampler.processed(sequence.ids(logits.device), own)
            position = start + place + 1
            if drawn_from:
                p, draft = scores.softmax(dim=-1), tree.only_draft(node)
                q = None if draft is None else drawn_from[place].dense(len(p)).to(p.device)
                token, agrees = sampler.accept_or_resample(p, q, draft, position, start)
                child = node + 1 if agrees else None
            else:
                token = sampler.choose(scores, position)
                child = tree.child(node, token)
            sampler.keep(scores, own)
        sequence.append(token)
        if child is not None:
            path.append(child)
        if sequence.finish_reason or child is None:
            return path
        node = child


def _walk_block(
    sequence: Decoded,
    logits: Tensor,
    drafts: Sequence[int],
    drawn_from: Sequence[DraftDistribution],
) -> int:
    """Block verification: decide about the whole block, then commit up to the sequence's end."""
    sampler, start = sequence.sampler, sequence.anchor_position
    assert sampler is not None
    before = sequence.ids(logits.device)
    ids = torch.cat((before, torch.tensor([drafts]).to(before)), dim=1)
    scores = [
        sampler.processed(ids[:, : before.shape[1] + place], logits[place])
        for place in range(len(drafts) + 1)
    ]
    p = [each.softmax(dim=-1) for each in scores]
    q = [each.dense(len(p[0])).to(logits.device) for each in drawn_from]
    accepted, token = sampler.verify_block(p, q, drafts, start)
    for place, each in enumerate([*drafts[:accepted], token]):
        sampler.keep(scores[place], logits[place])
        sequence.append(each)
        if sequence.finish_reason:
            return min(accepted, place + 1)
    return accepted
