"""Trees on the host: rows of a batch, and what became of the branches."""

import torch

from domino_spec.decoding.branches import Branches, VerifiedTree, batch_branches
from domino_spec.drafter.tree import chain, tree_of

PARENTS = [0, 0, 0, 1, 1, 2, 3]
TOKENS = [9, 10, 11, 12, 13, 14, 15]


def test_each_branch_is_a_row():
    tree = Branches(TOKENS, PARENTS, first_row=5)
    assert tree.paths == [[0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]
    assert tree.child(0, 11) == 2
    assert tree.child(1, 11) is None
    assert [tree.place(node) for node in (0, 4, 5, 6)] == [(5, 0), (5, 2), (6, 2), (7, 3)]


def test_short_branches_are_filled_up():
    parents = torch.tensor([PARENTS, [0, 0, 1, 2, 3, 4, 5]])
    tokens = torch.tensor([TOKENS, TOKENS])
    tree = tree_of(tokens, parents, torch.zeros_like(parents))
    each, owners, rows = batch_branches(tree)
    assert owners == [0, 0, 0, 1]
    assert rows[0].tolist() == [9, 10, 13, 13, 13, 13, 13]
    assert rows[3].tolist() == TOKENS
    assert [own.first_row for own in each] == [0, 3]
    _, owners, rows = batch_branches(chain(tokens))
    assert owners == [0, 1]
    assert torch.equal(rows, tokens)


def test_what_became_of_a_tree():
    tree = VerifiedTree(TOKENS, PARENTS, [1, 4])
    assert tree.depth == 3
    assert tree.ranks == [0, 1]
    assert tree.lost() == [[[11, 14]], [[12, 15]], []]
    assert VerifiedTree(TOKENS, PARENTS, []).lost() == [[[10, 12, 15], [11, 14]]]
