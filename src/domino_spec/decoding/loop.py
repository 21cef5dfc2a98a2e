"""The reference loop: propose, verify, commit. Every faster path is tested against this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_spec.decoding.proposers import Proposal, Proposer
from domino_spec.decoding.sampling import Choice, DraftDistribution, make_sampler
from domino_spec.decoding.scores import token_scores
from domino_spec.decoding.sequence import Sequence as Decoded
from domino_spec.decoding.sequence import SequenceOutput
from domino_spec.decoding.stats import RunStats, Stopwatch
from domino_spec.targets import Target, TargetCache


@torch.no_grad()
def decode(
    target: Target,
    proposer: Proposer,
    sequences: Sequence[Decoded],
    stats: RunStats | None = None,
) -> Iterator[SequenceOutput]:
    """Decode all sequences to their end, yielding what each commits as it is committed.

    A sequence whose `finish_reason` the caller sets in between is dropped.
    """
    stats = RunStats() if stats is None else stats
    watch = Stopwatch(stats, target.device)
    sequences = list(sequences)
    for sequence in sequences:
        if sequence.sampler is None:
            sequence.sampler = make_sampler(sequence, target.device)
        sequence.sampler.ids(sequence, target.device)
    cache = target.new_cache(len(sequences))
    proposer.begin(len(sequences))

    with watch.stage("prefill"):
        outputs = _prefill(target, proposer, cache, sequences)
    cycle = 0
    while True:
        yield from outputs
        with watch.stage("other"):
            sequences = _drop_finished(sequences, cache, proposer)
        if not sequences:
            return
        cycle += 1
        depth = min(proposer.depth, max(sequence.remaining for sequence in sequences) - 1)

        with watch.stage("draft"):
            proposal = (
                proposer.propose(sequences, depth) if depth else Proposal.empty(len(sequences))
            )
            anchors = torch.tensor([[sequence.anchor] for sequence in sequences])
            block = torch.cat((anchors, proposal.tokens.to(anchors.device)), dim=1)
        with watch.stage("verify"):
            lasts = [sequence.last_position for sequence in sequences]
            output = target.forward(block, cache, taps=proposer.taps, last_positions=lasts)
        with watch.stage("other"):
            outputs = _commit(sequences, output.logits, block[:, 1:], proposal, cycle)
            for each in outputs:
                if each.sequence.run is not stats:
                    counts = {"accepted": each.accepted, "committed": len(each.tokens)}
                    stats.rows.record(drafts=each.drafts, **counts)
            kept = [each.accepted + 1 for each in outputs]  # the anchor and accepted drafts
            cache.commit(kept)
        with watch.stage("draft"):
            proposer.observe(output.taps, kept)


def _prefill(
    target: Target, proposer: Proposer, cache: TargetCache, sequences: Sequence[Decoded]
) -> list[SequenceOutput]:
    """Read the prompts and choose each sequence's first token, its first anchor."""
    lengths = [len(sequence.prompt) for sequence in sequences]
    # Padding goes after the prompt, where causal attention keeps it out of sight.
    prompts = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    for index, sequence in enumerate(sequences):
        prompts[index, : lengths[index]] = torch.tensor(sequence.prompt)
    lasts = [length - 1 for length in lengths]
    output = target.forward(prompts, cache, taps=proposer.taps, keep=lasts)
    columns = [sorted(set(lasts)).index(last) for last in lasts]
    logits = output.logits[torch.arange(len(sequences)), columns].unsqueeze(1)
    empty = Proposal.empty(len(sequences))
    outputs = _commit(sequences, logits, prompts[:, :0], empty, cycle=0)
    cache.commit(lengths)
    proposer.observe(output.taps, lengths)
    return outputs


def _commit(
    sequences: Sequence[Decoded], logits: Tensor, drafts: Tensor, proposal: Proposal, cycle: int
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
            proposal.drawn_from[index],
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
    the first token that is not the draft or that stops the sequence.
    """
    sampler, accepted = sequence.sampler, 0
    assert sampler is not None
    for position in range(len(drafts) + 1):
        draft = drafts[position] if position < len(drafts) else None
        if argmax is not None:
            choice = Choice(argmax[position], argmax[position] == draft)
        else:
            q = drawn_from[position] if drawn_from and draft is not None else None
            ids = sampler.ids(sequence)
            choice, scores = sampler.choose(ids, logits[position], draft, q)
            sampler.keep(scores, logits[position])
        sequence.append(choice.token)
        accepted += choice.accepted
        if sequence.finish_reason or not choice.accepted:
            break
    return accepted


def _drop_finished(
    sequences: list[Decoded], cache: TargetCache, proposer: Proposer
) -> list[Decoded]:
    going = [index for index, sequence in enumerate(sequences) if not sequence.finished]
    if going and len(going) < len(sequences):
        cache.select(going)
        proposer.select(going)
    return [sequences[index] for index in going]
