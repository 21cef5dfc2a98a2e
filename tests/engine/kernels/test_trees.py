"""Trees on the device are those of `drafter.tree`, and are walked and compacted as there."""

import pytest
import torch

from domino_spec.drafter.tree import tree_of
from domino_spec.drafters import drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels import trees
from domino_spec.engine.kernels.commit import commit_tree, commit_tree_reference
from domino_spec.engine.kernels.compact import compact, compact_reference
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.model_runner import Plan
from tests.engine.kernels import paged
from tests.engine.kernels.test_rollout import Drafter
from tests.engine.runs import finish, make_requests, own
from tests.support.families import plain_greedy
from tests.support.pair import bigram_target, knowing_drafter, successor

SIZE, NEW = 64, 5  # heads of 16, which is as narrow as the kernels take
NAMES = ("tokens", "parents", "depths", "ancestors")
NOISES = {
    "greedy": None,
    "drawn": ([0.7, 1.3], [11, -(2**40)], [5, 900]),
    "one greedy": ([0.0, 0.9], [3, 4], [17, 2]),
}


@pytest.mark.parametrize(
    ("kind", "prefix", "reduced", "candidates", "depth", "nodes", "noise"),
    [
        ("domino", 1, False, 16, 5, 15, "greedy"),
        ("domino", 0, True, 16, 3, 7, "drawn"),
        ("domino", 2, False, 11, 2, 31, "one greedy"),
        ("domino", 1, False, 9, 1, 5, "greedy"),
        ("domino", 1, False, 3, 4, 15, "drawn"),
        ("markov", 0, False, 16, 4, 15, "drawn"),
        ("markov", 1, True, 9, 3, 7, "greedy"),
        ("none", 0, True, 16, 4, 15, "one greedy"),
    ],
)
def test_kernels_grow_the_reference_tree(
    device, kind, prefix, reduced, candidates, depth, nodes, noise
):
    drafter = Drafter(kind, prefix, reduced, device)
    given = drafter.inputs(device, depth=depth)
    base, columns = drafter.base_logits(None, given["hidden"]).topk(candidates, dim=-1)
    if NOISES[noise] is not None:
        heat, seeds, positions = NOISES[noise]
        noise = Noise(*(torch.tensor(each, device=device) for each in (heat, seeds, positions)))
    else:
        noise = None
    with torch.no_grad():
        found = trees.grow_tree(
            drafter.head, embedding=drafter.embedding, base=base, columns=columns,
            draft_tokens=drafter.draft_tokens, nodes=nodes, noise=noise, **given,
        )  # fmt: skip
        expected = trees.grow_reference(
            drafter.head, drafter.embedding, given["hidden"], given["anchor_tokens"], base,
            columns, drafter.draft_tokens, nodes, noise,
        )  # fmt: skip
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(("scale", "searched"), [(0.0, 1), (1000.0, 5)])
@torch.no_grad()
def test_depths_without_a_place_in_the_tree_are_not_searched(device, scale, searched):
    """Of tokens that are as likely the first depth has 15; a chain goes on to the last depth."""
    drafter = Drafter("domino", 5, False, device)
    given = drafter.inputs(device, depth=5)
    base, columns = drafter.base_logits(None, given["hidden"]).topk(16, dim=-1)
    search = trees._Search(given["anchor_tokens"], scale * base, columns, None, 15, None)
    search.carry_states(drafter.head, drafter.embedding, given["hidden"])
    assert search.ended.tolist() == [searched] * len(base)
    assert search.tree.depths.amax(dim=1).tolist() == [searched] * len(base)


@torch.no_grad()
def test_rows_whose_search_ends_at_different_depths_get_the_reference_trees(device):
    drafter = Drafter("domino", 1, False, device)
    given = drafter.inputs(device, depth=5)
    base, columns = drafter.base_logits(None, given["hidden"]).topk(16, dim=-1)
    base = base * torch.tensor([0.1, 3.0], device=device).view(2, 1, 1)
    search = trees._Search(given["anchor_tokens"], base, columns, None, 7, None)
    search.carry_states(drafter.head, drafter.embedding, given["hidden"])
    assert search.ended[0] < search.ended[1]
    expected = trees.grow_reference(
        drafter.head, drafter.embedding, given["hidden"], given["anchor_tokens"], base, columns,
        None, 7,
    )  # fmt: skip
    for name in NAMES:
        assert torch.equal(getattr(search.tree, name), getattr(expected, name)), name


SHAPES = {
    "bushy": [0, 0, 0, 1, 1, 2, 3, 3],
    "chain": [0, 0, 1, 2, 3, 4, 5, 6],
    "star": [0, 0, 0, 0, 0, 0, 0, 0],
}


def tree_like(shape, device, *, rows=3):
    parents = torch.tensor(SHAPES[shape]).expand(rows, -1).contiguous()
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths[:, parents[0, node]] + 1
    tokens = torch.arange(rows * parents.shape[1]).view(rows, -1) + 100
    return tree_of(*(each.to(device) for each in (tokens, parents, depths)))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_walks_through_trees(device, shape, told):
    """All of one branch, a part of another, nothing; the spare slot keeps its length."""
    tree = tree_like(shape, device)
    n, depth = tree.tokens.shape[1], int(tree.depths.max())
    chosen = torch.full_like(tree.tokens, 9)
    deepest = int(tree.depths[0].argmax())
    for row, goal in ((0, deepest), (1, int(tree.parents[0, deepest]))):
        node = goal
        while node:
            above = int(tree.parents[row, node])
            chosen[row, above] = tree.tokens[row, node]
            node = above
    bits = None
    if told:
        bits = torch.tensor([1, int(tree.ancestors[0, deepest]), 3], device=device)
    results = []
    for way in (commit_tree, commit_tree_reference):
        slots = torch.tensor([2, 0, 3], device=device)  # the last one fills up the batch
        lengths = torch.tensor([10, 20, 30, 0], device=device)
        anchors = torch.zeros(4, dtype=torch.long, device=device)
        report, path = way(chosen, tree, slots, lengths, anchors, depth, bits)
        results.append((report, path, lengths, anchors[:3]))
        assert report.shape == (3, 2 + 2 * depth + 2 * n)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    report, path, lengths, _ = results[0]
    if not told:
        assert report[:, 0].tolist() == [depth, depth - 1, 0]
        assert path[0].tolist()[-1] == deepest
    assert lengths[3] == 0
    assert lengths[2] == 30 + 1 + report[0, 0]


@pytest.mark.parametrize("count", [1, 6])
def test_accepted_drafts_are_moved_to_the_front(device, count):
    """Within slots of one page and of several."""
    shape = (2, 2, 3, 2, 24, 8)
    states = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(device)
    table = paged.table_of(3, count).to(device)
    pages, starts = table[[2, 0]], torch.tensor([5, 0], device=device)
    path = torch.tensor([[0, 2, 5, 3], [0, 1, 4, 7]], device=device)
    before, one, other = states, paged.cut(states, table), paged.cut(states, table)
    compact(one, pages, starts, path)
    compact_reference(other, pages, starts, path)
    assert torch.equal(one, other)
    one = paged.join(one, table)
    for row, (slot, start) in enumerate(((2, 5), (0, 0))):
        for goal, source in enumerate(path[row].tolist()):
            found = one[:, :, slot, :, start + goal]
            assert torch.equal(found, before[:, :, slot, :, start + source])
    assert torch.equal(one[:, :, 1], before[:, :, 1])
    assert torch.equal(one[:, :, 2, :, :5], before[:, :, 2, :, :5])


def test_trees_are_right_and_what_fills_up_a_batch_changes_nothing(device):
    """A whole cycle by kernels alone."""
    table = successor(SIZE)
    target = bigram_target(table)
    answer = plain_greedy(target.model, [4, 9, 4], NEW)
    target.model.to(device)
    drafter = knowing_drafter(shift=True, prefix=1, table=table, head_dim=16)
    drafter = drafter_of(drafter, candidates=SIZE).with_depth(3)
    engine = Engine(own(target), drafter, slots=2, capacity=24, pack=False, graphs=False, tree=5)
    (sequence,) = make_requests([[4, 9, 4]], max_new_tokens=NEW)
    engine.add_request(sequence)
    engine.step()
    spare = engine.slots.spare
    engine.runner.run_cycle(torch.tensor([spare, spare], device=device), Plan(3, 5))
    finish(engine)
    assert sequence.output == answer
    assert sequence.stats.tokens_per_cycle > 2
