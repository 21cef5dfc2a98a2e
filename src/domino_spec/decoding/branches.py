"""Draft trees on the host: their branches as rows of a batch, which any target can verify.

The reference loop gives each branch a row and a copy of the cache: no mask, no positions of its
own. The engine verifies the same tree in one row (`engine.attention`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.drafter.tree import DraftTree


@dataclass(frozen=True)
class VerifiedTree:
    """One sequence's tree once the target has read it; node 0 is the anchor."""

    tokens: Sequence[int]
    parents: Sequence[int]
    path: Sequence[int]
    """The accepted nodes, in order."""

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def ranks(self) -> list[int]:
        """Which of its parent's children each accepted node is: 0 is the best."""
        before: Counter[int] = Counter()
        ranks = [0]
        for parent in self.parents[1:]:
            ranks.append(before[parent])
            before[parent] += 1
        return [ranks[node] for node in self.path]

    def lost(self) -> list[list[list[int]]]:
        """After the anchor and each accepted node, the tokens of branches that were not accepted.

        The best first; each is followed by best children to its end.
        """
        children: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]].append(node)
        found = []
        for node, kept in zip([0, *self.path], [*self.path, None], strict=True):
            branches = []
            for child in children[node]:
                if child == kept:
                    continue
                branch = [child]
                while children[branch[-1]]:
                    branch.append(children[branch[-1]][0])
                branches.append([self.tokens[each] for each in branch])
            found.append(branches)
        return found


class Branches:
    """One sequence's tree: where its nodes lie in the rows of its branches."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], first_row: int = 0) -> None:
        """Node 0 is the anchor, its own parent; parents come before their children."""
        self.tokens, self.parents = tokens, parents
        self._children: list[dict[int, int]] = [{} for _ in tokens]
        for node in range(1, len(tokens)):
            self._children[parents[node]].setdefault(tokens[node], node)
        leaves = [node for node, children in enumerate(self._children) if not children]
        self.paths = [self._path(leaf) for leaf in leaves]
        self.first_row = first_row
        self._rows: dict[int, int] = {}
        """The first row in which each node lies."""
        self.depths: dict[int, int] = {}
        for row, path in enumerate(self.paths):
            for depth, node in enumerate(path):
                self._rows.setdefault(node, first_row + row)
                self.depths[node] = depth

    def child(self, node: int, token: int) -> int | None:
        """The node that stands for a token after another."""
        return self._children[node].get(token)

    def only_draft(self, node: int) -> int | None:
        """The draft after a node of a chain."""
        return next(iter(self._children[node]), None)

    def place(self, node: int) -> tuple[int, int]:
        """A row and a column of the batch in which the node lies."""
        return self._rows[node], self.depths[node]

    def _path(self, node: int) -> list[int]:
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]


def batch_branches(tree: DraftTree) -> tuple[list[Branches], list[int], Tensor]:
    """The branches of each sequence's tree, the sequence of each row, tokens [rows, n].

    Shorter branches are filled up with their last token.
    """
    each: list[Branches] = []
    owners: list[int] = []
    rows: list[list[int]] = []
    for index, (tokens, parents) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    ):
        own = Branches(tokens, parents, first_row=len(rows))
        each.append(own)
        owners += [index] * len(own.paths)
        rows += [[tokens[node] for node in path] for path in own.paths]
    longest = max(map(len, rows))
    filled = [row + row[-1:] * (longest - len(row)) for row in rows]
    return each, owners, torch.tensor(filled)
