"""Draft trees: the likeliest continuations of an anchor, each branch with a head state of its own.

Nodes of one depth are lanes of a batch. Each lane's best children are scored by the chance of the
whole path to them; the best of a depth are the next depth's lanes, and the best of all depths are
the tree. A path's score never rises along it, so parents come before their children, and the tree
of fewer nodes is the beginning of the larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.drafter.heads import Embed, Head
from domino_spec.drafter.rollout import target_tokens

LANES = 16
"""Nodes of a depth that may have children: with as many as the tree has, it is the best tree."""
MAX_NODES = 63
"""Nodes besides the anchor: a node's ancestors are bits of one integer."""

Scores = Callable[[int, Tensor, Tensor | None], Tensor]
"""(draft index, logits [batch, lanes, k], their ids [batch, k] or None for all) -> scores alike.

Their softmax is taken for the chance that the target chooses a token."""


@dataclass(frozen=True)
class DraftTree:
    """The nodes of each sequence's tree, the anchor first, then the likeliest before the others."""

    tokens: Tensor  # [batch, 1 + nodes]
    parents: Tensor  # [batch, 1 + nodes]: places in here; the anchor's is 0
    depths: Tensor  # [batch, 1 + nodes]: 0 is the anchor's
    ancestors: Tensor  # [batch, 1 + nodes] int64: bit j says that node j is one, or the node itself
    paths: Tensor  # [batch, 1 + nodes, 1 + nodes]: the nodes on the way, the anchor's, its own last


def tree_nodes(nodes: int, depth: int, width: int) -> int:
    """How many nodes a tree of up to so many has, `depth` deep, with `width` tokens to try."""
    children, lanes, found = min(LANES, width), 1, 0
    for _ in range(min(depth, nodes)):
        lanes = min(LANES, lanes * children)
        found += lanes
    return min(nodes, found)


def grow(
    head: Head | None,
    embed: Embed,
    *,
    hidden: Tensor,  # [batch, depth, hidden]
    anchor_tokens: Tensor,  # [batch]
    base: Tensor,  # [batch, depth, k]
    columns: Tensor | None,  # [batch, depth, k]: tokens of the base logits; None for all
    draft_tokens: Tensor | None,
    nodes: int,
    scores: Scores,
) -> DraftTree:
    """A tree of so many nodes over base logits; fewer where there are not as many paths."""
    batch, depth, width = base.shape
    nodes, children = tree_nodes(nodes, depth, width), min(LANES, width)
    lanes = anchor_tokens.to(hidden.device).unsqueeze(1)  # [batch, lanes]
    chances = torch.zeros(batch, 1, device=hidden.device)  # of the paths to them, as logarithms
    if head is not None:
        projected = head.project_hidden(hidden).unsqueeze(2)  # [batch, depth, 1, ...]
        states = head.initial_state(batch, hidden).unsqueeze(1)  # [batch, lanes, state]
    # All lanes of all depths, after the anchor: token, place of the parent, chance, depth.
    none = torch.zeros_like(lanes)
    tokens, parents, found, depths = [lanes], [none], [chances], [none]
    first, count = 0, 1  # place of the first lane, and how many there are in all
    for index in range(min(depth, nodes)):
        logits = base[:, index].unsqueeze(1)
        tried = None if columns is None else columns[:, index]
        if head is not None:
            states = head.step(lanes, states, embed)
            if index >= head.prefix_len:
                own = None if tried is None else tried.unsqueeze(1)
                logits = logits + head.correction(projected[:, index], states, own)
        ids = target_tokens(tried, draft_tokens, logits)
        logits = logits.expand(-1, lanes.shape[1], -1)
        best, column = scores(index, logits, ids).float().log_softmax(dim=-1).topk(children)
        paths = (chances.unsqueeze(2) + best).flatten(1)  # [batch, lanes * children]
        order = paths.argsort(dim=1, descending=True, stable=True)[:, :LANES]
        chances, parent = paths.gather(1, order), order // children
        lanes = column.flatten(1).gather(1, order)
        lanes = lanes if ids is None else ids.gather(1, lanes)
        if head is not None:
            states = states.gather(1, parent.unsqueeze(2).expand(-1, -1, states.shape[2]))
        tokens.append(lanes)
        parents.append(first + parent)
        found.append(chances)
        depths.append(torch.full_like(lanes, index + 1))
        first, count = count, count + lanes.shape[1]
    every = torch.cat(found, dim=1)
    # The anchor's chance is 1 and it comes first; so do parents, should chances be equal.
    order = every.argsort(dim=1, descending=True, stable=True)[:, : nodes + 1]
    places = torch.zeros_like(every, dtype=torch.long)
    places.scatter_(1, order, torch.arange(nodes + 1, device=order.device).expand_as(order))
    parent = places.gather(1, torch.cat(parents, dim=1).gather(1, order))
    deep = torch.cat(depths, dim=1).gather(1, order)
    whole = torch.cat(tokens, dim=1).gather(1, order)
    return tree_of(whole, parent, deep, deepest=min(depth, nodes))


def tree_of(
    tokens: Tensor, parents: Tensor, depths: Tensor, *, deepest: int | None = None
) -> DraftTree:
    """A tree of nodes [batch, n] with these parents and depths, none more than `deepest`."""
    n = tokens.shape[1]
    places = torch.arange(n, device=tokens.device)
    paths = torch.zeros(*tokens.shape, n, dtype=torch.long, device=tokens.device)
    above, bits = places.expand_as(parents), torch.zeros_like(parents)
    for _ in range(n if deepest is None else deepest + 1):
        bits = bits | (1 << above)
        paths.scatter_(2, depths.gather(1, above).unsqueeze(2), above.unsqueeze(2))
        above = parents.gather(1, above)
    return DraftTree(tokens, parents, depths, bits, paths)


def chain(tokens: Tensor) -> DraftTree:
    """An anchor and drafts [batch, n], each the only child of the one before."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    paths = places.unsqueeze(1).expand(-1, tokens.shape[1], -1)
    return DraftTree(tokens, (places - 1).clamp(min=0), places, (2 << places) - 1, paths)


def ancestor_mask(bits: Tensor) -> Tensor:
    """Whom each node sees of the others, [batch, n] int64 -> [batch, n, n] bool."""
    return (bits.unsqueeze(2) >> torch.arange(bits.shape[1], device=bits.device)) & 1 == 1
