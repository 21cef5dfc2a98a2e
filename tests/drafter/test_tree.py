"""Draft trees: best-first search by the head's own rollout along every path."""

import heapq

import pytest
import torch

from domino_spec.drafter.rollout import roll
from domino_spec.drafter.tree import (
    LANES,
    ancestor_mask,
    chain,
    grow,
    tree_nodes,
)
from tests.support.families import HIDDEN, VOCAB, drafter_config, markov_head, random_drafter

HEADS = {"domino": True, "domino, prefix 0": True, "markov": markov_head(), "none": False}
DEPTH, WIDTH = 6, 12


def parts(kind, *, batch=2, width=WIDTH):
    """What a tree is grown over: states, anchors, base logits of some columns."""
    model = random_drafter(drafter_config(head=HEADS[kind], prefix=0 if "0" in kind else 1))
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    columns = torch.stack([
        torch.randperm(VOCAB, generator=generator)[:width] for _ in range(batch * DEPTH)
    ]).view(batch, DEPTH, width)  # fmt: skip
    given = {
        "hidden": torch.randn(batch, DEPTH, HIDDEN, generator=generator),
        "anchor_tokens": torch.tensor([7, 50][:batch]),
        "base": torch.randn(batch, DEPTH, width, generator=generator),
        "columns": columns,
        "draft_tokens": None,
    }
    return model.head, lambda tokens: embedding[tokens], given


def raw(_index, logits, _tokens):
    return logits


@torch.no_grad()
def scores_after(head, embed, given, row, path):
    """Log-probabilities of the draft after a path of columns, by the chain's own rollout."""
    found = []

    def follow(index, logits, _tokens):
        if index == len(path):
            found.append(logits[0].float().log_softmax(dim=-1))
        return torch.tensor([path[index] if index < len(path) else 0])

    own = {k: None if v is None else v[row : row + 1] for k, v in given.items()}
    roll(head, embed, **own, choose=follow)
    return found[0]


def best_first(head, embed, given, row, nodes):
    """Paths of tokens, the likeliest first: no frontier, a heap."""
    heap, found = [(0.0, (), ())], []
    while heap and len(found) <= nodes:
        chance, path, tokens = heapq.heappop(heap)
        found.append(tokens)
        if len(path) == DEPTH:
            continue
        scores = scores_after(head, embed, given, row, path)
        for column in scores.topk(len(scores)).indices.tolist():
            token = int(given["columns"][row, len(path), column])
            step = (chance - float(scores[column]), (*path, column), (*tokens, token))
            heapq.heappush(heap, step)
    return found[1 : nodes + 1]


def paths_of(tree, row):
    """Each node's path of tokens."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


@pytest.mark.parametrize("kind", HEADS)
def test_the_tree_is_that_of_best_first_search(kind):
    head, embed, given = parts(kind)
    tree = grow(head, embed, **given, nodes=LANES - 1, scores=raw)
    for row in range(2):
        assert paths_of(tree, row) == best_first(head, embed, given, row, LANES - 1)
    depths = [[len(path) for path in paths_of(tree, row)] for row in range(2)]
    assert tree.depths[:, 1:].tolist() == depths
    assert tree.tokens[:, 0].tolist() == given["anchor_tokens"].tolist()
    assert len({path[0] for path in paths_of(tree, 0)}) > 1  # it branches


def test_a_smaller_tree_is_the_beginning_of_a_larger_one():
    head, embed, given = parts("domino")
    large = grow(head, embed, **given, nodes=31, scores=raw)
    for nodes in (1, 2, 7, 15):
        small = grow(head, embed, **given, nodes=nodes, scores=raw)
        for name in ("tokens", "parents", "depths", "ancestors"):
            assert torch.equal(getattr(small, name), getattr(large, name)[:, : nodes + 1])


def test_nodes_see_their_ancestors_and_themselves():
    head, embed, given = parts("domino")
    tree = grow(head, embed, **given, nodes=15, scores=raw)
    mask, parents = ancestor_mask(tree.ancestors), tree.parents.tolist()
    for row in range(2):
        for node in range(16):
            seen, above = {node}, node
            while above:
                above = parents[row][above]
                seen.add(above)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(seen)


def test_scores_rank_the_children():
    """What is wanted of a token counts as if the drafter had said so."""
    head, embed, given = parts("none")
    wanted = given["columns"][:, :, 3]

    def ranked(index, logits, tokens):
        return logits + 50.0 * (tokens == wanted[:, index].unsqueeze(1)).unsqueeze(1)

    tree = grow(head, embed, **given, nodes=DEPTH, scores=ranked)
    assert torch.equal(tree.tokens[:, 1:], wanted)
    assert torch.equal(tree.parents, chain(tree.tokens).parents)


@pytest.mark.parametrize(
    ("nodes", "depth", "width", "found"),
    [(15, 6, 12, 15), (15, 1, 20, 15), (15, 1, 12, 12), (15, 3, 1, 3), (9, 2, 2, 6)],
)
def test_there_are_no_more_nodes_than_paths(nodes, depth, width, found):
    head, embed, given = parts("domino", width=width)
    given |= {name: given[name][:, :depth] for name in ("hidden", "base", "columns")}
    assert tree_nodes(nodes, depth, width) == found
    assert grow(head, embed, **given, nodes=nodes, scores=raw).tokens.shape == (2, found + 1)


def test_a_chain_is_a_tree():
    tree = chain(torch.tensor([[4, 5, 6, 7]]))
    assert tree.parents.tolist() == [[0, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 2, 3]]
    assert tree.paths[0, 2].tolist()[:3] == [0, 1, 2]
    assert torch.equal(ancestor_mask(tree.ancestors)[0], torch.ones(4, 4).tril().bool())
