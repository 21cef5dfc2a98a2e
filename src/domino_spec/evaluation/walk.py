"""From matching drafts to the cycles of decoding, counted as the reference loop counts them."""

from __future__ import annotations

from collections.abc import Sequence

from domino_spec.decoding import RowStats


def walk(
    matches: Sequence[Sequence[int]],
    *,
    depth: int,
    max_new_tokens: int,
    batches: Sequence[Sequence[int]],
) -> list[RowStats]:
    """Each row's counts, where `matches[row][i]` drafts are right behind its i-th token.

    A row has one token more than matches: its last is no anchor. The first is the prefill's.
    """
    stats = [RowStats() for _ in matches]
    for batch in batches:
        done = dict.fromkeys(batch, 1)
        going = [row for row in batch if matches[row]]
        while going:
            width = min(depth, max_new_tokens - min(done[row] for row in going) - 1)
            for row in going:
                room = max_new_tokens - done[row]
                left = len(matches[row]) + 1 - done[row]
                accepted = min(matches[row][done[row] - 1], width)
                committed = min(accepted + 1, left)
                # A draft that ends the row leaves none behind it that could be verified.
                ended = accepted == left
                offered = accepted if ended else min(width, room)
                stats[row].record(drafts=offered, accepted=accepted, committed=committed)
                done[row] += committed
            going = [row for row in going if done[row] <= len(matches[row])]
    return stats


def count_anchors(matches: Sequence[Sequence[int]], *, depth: int) -> tuple[list[int], list[int]]:
    """Over every anchor: how often each draft was reached, and how often it was right."""
    reached, right = [0] * depth, [0] * depth
    for row in matches:
        for index, count in enumerate(row):
            for position in range(count):
                right[position] += 1
            # The first wrong draft is reached too, unless the answer or the block ends there.
            for position in range(min(count + 1, depth, len(row) - index)):
                reached[position] += 1
    return reached, right
