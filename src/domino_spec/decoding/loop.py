"""The reference loop: propose, verify, commit. Every faster path is tested against this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_spec.decoding.drafter import Drafter, SequenceSampler
from domino_spec.decoding.sampling import DraftDistribution, make_sampler
from domino_spec.decoding.sequence import Sequence as Decoded
from domino_spec.decoding.sequence import SequenceOutput, token_scores
from domino_spec.decoding.stats import RunStats, Stopwatch
from domino_spec.targets import Target, TargetCache


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
            block = drafting.block(anchors, depth, sampler)
        with watch.stage("verify"):
            lasts = [sequence.last_position for sequence in sequences]
            output = target.forward(
                block, cache, capture_layers=drafting.capture_layers, last_positions=lasts
            )
        with watch.stage("other"):
            outputs = _commit(sequences, output.logits, block[:, 1:], sampler.distributions, cycle)
            for each in outputs:
                if each.sequence.run is not stats:
                    counts = {"accepted": each.accepted, "committed": len(each.tokens)}
                    stats.acceptance.record(drafts=each.drafts, **counts)
            kept = [each.accepted + 1 for each in outputs]  # the anchor and accepted drafts
            cache.commit(kept)
        with watch.stage("draft"):
            drafting.update(output.captured, block, kept)


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
            self.depth = self._drafter.depth
            self.capture_layers = self._drafter.capture_layers
            longest = max(sequence.max_length for sequence in sequences)
            capacity = longest + self.depth + 1 + self._drafter.lookahead
            self._drafter.resize(slots=len(sequences), capacity=capacity)

    def select(self, going: Sequence[int]) -> None:
        """Only these sequences go on, in this order."""
        self._slots = [self._slots[index] for index in going]
        self._lengths = [self._lengths[index] for index in going]

    def block(self, anchors: Tensor, depth: int, sampler: SequenceSampler) -> Tensor:
        """Each anchor and its drafts, [batch, 1 + drafts]."""
        if self._drafter is None or not depth:
            return anchors
        drafts = self._drafter.propose(
            anchors[:, 0].to(self._drafter.device), **self._places(), depth=depth, sampler=sampler
        )
        return torch.cat((anchors, drafts.to(anchors.device)), dim=1)

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
    lengths = [len(sequence.prompt) for sequence in sequences]
    # Padding goes after the prompt, where causal attention keeps it out of sight.
    prompts = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    for index, sequence in enumerate(sequences):
        prompts[index, : lengths[index]] = torch.tensor(sequence.prompt)
    lasts = [length - 1 for length in lengths]
    output = target.forward(prompts, cache, capture_layers=drafting.capture_layers, keep=lasts)
    columns = [sorted(set(lasts)).index(last) for last in lasts]
    logits = output.logits[torch.arange(len(sequences)), columns].unsqueeze(1)
    outputs = _commit(sequences, logits, prompts[:, :0], [None] * len(sequences), cycle=0)
    cache.commit(lengths)
    drafting.update(output.captured, prompts, lengths)
    return outputs


def _commit(
    sequences: Sequence[Decoded],
    logits: Tensor,
    drafts: Tensor,
    distributions: Sequence[Sequence[DraftDistribution] | None],
    cycle: int,
) -> list[SequenceOutput]:
    """Let each sequence walk its verified block and keep what plain decoding would have chosen."""
    # One transfer serves every sequence that needs no more than an argmax.
    samplers = [sequence.sampler for sequence in sequences]
    plain = [sampler is not None and sampler.plain for sampler in samplers]
    argmax = logits.argmax(dim=-1).tolist() if any(plain) else None
    outputs = []
    for index, (sequence, own) in enumerate(zip(sequences, drafts.tolist(), strict=True)):
        before, wanted = len(sequence.output), sequence.params.logprobs
        # Before the walk: a processor may write into the logits it is given.
        raw = None if wanted is None else logits[index].float().log_softmax(dim=-1)
        accepted = _walk(
            sequence,
            logits[index],
            own,
            distributions[index],
            argmax[index] if argmax is not None and plain[index] else None,
        )
        tokens = tuple(sequence.output[before:])
        scores = None
        if raw is not None and wanted is not None:
            scores = token_scores(raw, tokens, wanted)
        drafted = 0
        if cycle:
            sequence.cycles = cycle
            drafted = sequence.end_cycle(len(tokens), accepted, len(own))
        reason = sequence.finish_reason
        outputs.append(SequenceOutput(sequence, tokens, accepted, cycle, reason, scores, drafted))
    return outputs


def _walk(
    sequence: Decoded,
    logits: Tensor,  # [len(drafts) + 1, vocabulary]
    drafts: Sequence[int],
    drawn_from: Sequence[DraftDistribution] | None,
    argmax: Sequence[int] | None,
) -> int:
    """Walk the verified block as plain decoding would; how many drafts were accepted.

    Each position is processed once, in order, seeing only committed tokens, and the walk ends at
    the first token that is not an accepted draft or that stops the sequence.
    """
    sampler, accepted = sequence.sampler, 0
    assert sampler is not None
    if drawn_from and sampler.rule == "block":
        return _walk_block(sequence, logits, drafts, drawn_from)
    start = sequence.anchor_position
    for place in range(len(drafts) + 1):
        draft = drafts[place] if place < len(drafts) else None
        if argmax is not None:
            token = argmax[place]
            agrees = token == draft
        else:
            scores = sampler.processed(sequence.ids(logits.device), logits[place])
            position = start + place + 1
            if drawn_from:
                p = scores.softmax(dim=-1)
                q = None if draft is None else drawn_from[place].dense(len(p)).to(p.device)
                token, agrees = sampler.accept_or_resample(p, q, draft, position, start)
            else:
                token = sampler.choose(scores, position)
                agrees = token == draft
            sampler.keep(scores, logits[place])
        sequence.append(token)
        accepted += agrees
        if sequence.finish_reason or not agrees:
            break
    return accepted


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
