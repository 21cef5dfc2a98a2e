"""The end of a cycle: drafts counted, slots advanced."""

import pytest
import torch

from domino_spec.engine.kernels.commit import commit, commit_reference

CHOSEN = [[5, 6, 7, 0], [5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]]
BLOCK = [[0, 5, 6, 7], [0, 5, 0, 7], [0, 9, 2, 3], [9, 9, 9, 9]]  # the last is a spare slot's
SLOTS = [2, 0, 1, 4]


@pytest.mark.parametrize("apply", [commit, commit_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("pretended", [None, [0, 3, 2, 1]])
def test_slots_advance_by_what_was_accepted(apply, pretended, device):
    lengths = torch.tensor([10, 20, 30, 40, 0], device=device)
    anchors = torch.full((5,), -1, device=device)
    arguments = [torch.tensor(each, device=device) for each in (CHOSEN, BLOCK, SLOTS)]
    given = None if pretended is None else torch.tensor(pretended, device=device)
    report, counts = apply(*arguments, lengths, anchors, given)
    accepted = pretended or [3, 1, 0, 3]
    assert report[:, 0].tolist() == counts.tolist() == accepted
    assert report[:, 1:].tolist() == CHOSEN
    assert lengths.tolist() == [
        10 + accepted[1] + 1,
        20 + accepted[2] + 1,
        30 + accepted[0] + 1,
        40,
        0,
    ]
    for row, slot in enumerate(SLOTS):
        assert anchors[slot] == CHOSEN[row][accepted[row]]
    assert anchors[3] == -1


@pytest.mark.parametrize("apply", [commit, commit_reference], ids=["kernel", "reference"])
def test_no_draft_behind_the_reach_is_accepted(apply, device):
    arguments = [torch.tensor(each, device=device) for each in (CHOSEN, BLOCK, SLOTS)]
    slots = [torch.zeros(5, dtype=torch.long, device=device) for _ in range(2)]
    reach = torch.tensor([[2, 9], [3, 9], [3, 9], [0, 9]], device=device)[:, 0]
    report, counts = apply(*arguments, *slots, None, reach)
    assert report[:, 0].tolist() == counts.tolist() == [2, 1, 0, 0]
    assert slots[0].tolist() == [2, 1, 3, 0, 0]


def test_a_plain_step_advances_by_one(device):
    lengths, anchors = torch.tensor([7, 0], device=device), torch.zeros(2, device=device).long()
    chosen, block = torch.tensor([[3]], device=device), torch.tensor([[1]], device=device)
    report, _ = commit(chosen, block, torch.tensor([0], device=device), lengths, anchors)
    assert report.tolist() == [[0, 3]]
    assert lengths.tolist() == [8, 0]
    assert anchors.tolist()[0] == 3
