"""The reference loop: propose, verify, commit. Every faster path is tested against this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_spec.decoding.proposers import Proposal, Proposer
from domino_spec.decoding.rows import Commit, Row
from domino_spec.decoding.scores import token_scores
from domino_spec.decoding.stats import RunStats, Stopwatch
from domino_spec.decoding.verifier import CacheT, RowCache, Verifier


@torch.no_grad()
def decode(
    target: Verifier[CacheT],
    proposer: Proposer,
    rows: Sequence[Row],
    stats: RunStats | None = None,
) -> Iterator[Commit]:
    """Decode all rows to their end, yielding what each commits as it is committed."""
    stats = RunStats() if stats is None else stats
    watch = Stopwatch(stats, target.device)
    rows = list(rows)
    cache = target.new_cache(len(rows))
    proposer.begin(len(rows))

    with watch.stage("prefill"):
        commits = _prefill(target, proposer, cache, rows)
    cycle = 0
    while True:
        yield from commits
        with watch.stage("other"):
            rows = _drop_finished(rows, cache, proposer)
        if not rows:
            return
        cycle += 1
        depth = min(proposer.depth, max(row.remaining for row in rows) - 1)

        with watch.stage("draft"):
            proposal = proposer.propose(rows, depth) if depth else Proposal.empty(len(rows))
            anchors = torch.tensor([[row.anchor] for row in rows])
            block = torch.cat((anchors, proposal.tokens.to(anchors.device)), dim=1)
        with watch.stage("verify"):
            lasts = [row.last_position for row in rows]
            output = target.forward(block, cache, taps=proposer.taps, last_positions=lasts)
        with watch.stage("other"):
            commits = _commit(rows, output.logits, block[:, 1:], proposal, cycle)
            kept = [commit.accepted + 1 for commit in commits]  # the anchor and accepted drafts
            cache.commit(kept)
        with watch.stage("draft"):
            proposer.observe(output.taps, kept)
        for row, commit in zip(rows, commits, strict=True):
            counts = {"accepted": commit.accepted, "committed": len(commit.tokens)}
            drafts = offered(row, commit, proposal.tokens.shape[1])  # may be fewer than asked for
            row.stats.record(drafts=drafts, **counts)
            stats.rows.record(drafts=drafts, **counts)


def _prefill(
    target: Verifier[CacheT], proposer: Proposer, cache: CacheT, rows: Sequence[Row]
) -> list[Commit]:
    """Read the prompts and choose each row's first token, its first anchor."""
    lengths = [len(row.prompt) for row in rows]
    # Padding goes behind the prompt, where causal attention keeps it out of sight.
    prompts = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for index, row in enumerate(rows):
        prompts[index, : lengths[index]] = torch.tensor(row.prompt)
    lasts = [length - 1 for length in lengths]
    output = target.forward(prompts, cache, taps=proposer.taps, keep=lasts)
    columns = [sorted(set(lasts)).index(last) for last in lasts]
    logits = output.logits[torch.arange(len(rows)), columns].unsqueeze(1)
    commits = _commit(rows, logits, prompts[:, :0], Proposal.empty(len(rows)), cycle=0)
    cache.commit(lengths)
    proposer.observe(output.taps, lengths)
    return commits


def _commit(
    rows: Sequence[Row], logits: Tensor, drafts: Tensor, proposal: Proposal, cycle: int
) -> list[Commit]:
    """Let each row walk its verified block and keep what plain decoding would have chosen."""
    # One transfer serves every row that needs no more than an argmax.
    argmax = logits.argmax(dim=-1).tolist() if any(row.plain for row in rows) else None
    commits = []
    for index, (row, row_drafts) in enumerate(zip(rows, drafts.tolist(), strict=True)):
        before = len(row.generated)
        wanted = row.sampler.logprobs
        # Before the walk: a processor may write into the logits it is given.
        raw = None if wanted is None else logits[index].float().log_softmax(dim=-1)
        accepted = row.commit_block(
            logits[index],
            row_drafts,
            proposal.drawn_from[index],
            argmax[index] if argmax is not None and row.plain else None,
        )
        tokens = tuple(row.generated[before:])
        scores = None
        if raw is not None and wanted is not None:
            scores = token_scores(raw, tokens, wanted)
        commits.append(Commit(row.index, tokens, accepted, cycle, row.finish_reason, scores))
    return commits


def offered(row: Row, commit: Commit, depth: int) -> int:
    """How many drafts had a chance: those behind a row's end had none."""
    if commit.finish_reason and commit.accepted == len(commit.tokens):
        return commit.accepted
    return min(depth, row.remaining + len(commit.tokens))


def _drop_finished(rows: list[Row], cache: RowCache, proposer: Proposer) -> list[Row]:
    going = [index for index, row in enumerate(rows) if row.finish_reason is None]
    if going and len(going) < len(rows):
        cache.select(going)
        proposer.select(going)
    return [rows[index] for index in going]
