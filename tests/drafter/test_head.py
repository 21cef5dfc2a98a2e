"""The head computes the formula, and its rollout costs no more than it must."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from domino_spec.drafter import DraftModel
from domino_spec.drafter.heads import DominoHead
from domino_spec.drafter.rollout import rollout
from domino_spec.errors import ConfigError
from tests.support.families import VOCAB, drafter_config, make_target, random_drafter
from tests.support.pair import bigram_target, knowing_drafter, successor


def spelled_out_drafts(drafter, target, hidden, anchor):
    """Greedy drafts by the formula, running the whole GRU again for every draft."""
    head, config = drafter.head, drafter.config
    w1, w2 = head.embed_proj[0].weight, head.embed_proj[2].weight
    drafts = []
    for j in range(hidden.shape[0]):
        logits = target.logits(hidden[j])
        if j >= config.head.pure_draft_prefix_len:
            prefix = target.embed(torch.tensor([[anchor, *drafts]]))
            state = head.prefix_gru(prefix)[0][0, -1]  # after j + 1 inputs
            logits = logits + w2 @ F.silu(w1 @ torch.cat((hidden[j], state)))
        drafts.append(int(logits.argmax()))
    return drafts


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_rollout_follows_the_formula(prefix):
    target = make_target("qwen3")
    drafter = random_drafter(drafter_config(prefix=prefix))
    hidden = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([3, 50, 7, 96])
    with torch.no_grad():
        found = rollout(drafter, target, hidden=hidden, anchor_tokens=anchors)
        expected = [
            spelled_out_drafts(drafter, target, hidden[row], int(anchors[row])) for row in range(4)
        ]
        without_head = target.logits(hidden).argmax(-1)
    assert found.tolist() == expected
    assert found.tolist() != without_head.tolist(), "the head changes nothing: the test is blind"
    assert found[:, :prefix].tolist() == without_head[:, :prefix].tolist()


class AllocationLog(TorchDispatchMode):
    """Every storage that operations allocate, kept alive so that none is counted twice."""

    def __init__(self, *existing):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.new = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.known.add(storage.data_ptr())
                    self.new.append(storage)
        return output


def test_rollout_costs_what_it_should(monkeypatch):
    target = make_target("llama")
    drafter = random_drafter()
    rows, depth = 3, 7
    hidden = torch.randn(rows, depth, 32)
    calls = {"gru": 0, "project": [], "lm_head": 0, "step": 0}

    def counted(name, method):
        def wrapper(self, *args):
            calls[name] = calls[name] + 1
            return method(self, *args)

        return wrapper

    def projected(self, states):
        calls["project"].append(states.shape[1])
        return project(self, states)

    project = DominoHead.project_hidden
    monkeypatch.setattr(DominoHead, "states", counted("gru", DominoHead.states))
    monkeypatch.setattr(DominoHead, "step", counted("step", DominoHead.step))
    monkeypatch.setattr(DominoHead, "project_hidden", projected)
    count_lm_head = target.lm_head.register_forward_hook(
        lambda *_: calls.__setitem__("lm_head", calls["lm_head"] + 1)
    )
    try:
        existing = [hidden, *drafter.parameters(), *target.model.parameters()]
        with torch.no_grad(), AllocationLog(*existing) as log:
            rollout(drafter, target, hidden=hidden, anchor_tokens=torch.zeros(rows, dtype=int))
    finally:
        count_lm_head.remove()
    assert calls["gru"] == 0, "a step must not run the GRU over the prefix"
    assert calls["step"] == depth, "one GRU step a draft"
    assert calls["project"] == [depth], "hidden states are projected once, all slots together"
    assert calls["lm_head"] == 1
    whole = [storage for storage in log.new if storage.nbytes() >= 4 * rows * depth * VOCAB]
    assert len(whole) == 1, "only the base logits are [rows, depth, vocabulary]"


def test_candidates_restrict_the_choice_to_the_best_base_logits():
    target = make_target("llama")
    drafter = random_drafter()
    hidden = torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(3))
    anchors = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        exact = rollout(drafter, target, hidden=hidden, anchor_tokens=anchors)
        every = rollout(drafter, target, hidden=hidden, anchor_tokens=anchors, candidates=VOCAB - 1)
        few = rollout(drafter, target, hidden=hidden, anchor_tokens=anchors, candidates=5)
        best = target.logits(hidden).topk(5, dim=-1).indices
    assert (every == exact).float().mean() > 0.9
    assert bool((best == few.unsqueeze(-1)).any(-1).all())
    assert few.tolist() != exact.tolist()


def test_reduced_vocabulary_proposes_target_ids():
    target = make_target("llama")
    allowed = torch.tensor([90, 5, 17, 33, 2, 64, 71])
    config = drafter_config(draft_vocab_size=len(allowed))
    drafter = random_drafter(config)
    drafter.draft_tokens = allowed
    hidden = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for candidates in (None, 3):
            drafts = rollout(
                drafter,
                target,
                hidden=hidden,
                anchor_tokens=torch.tensor([1, 2, 3]),
                candidates=candidates,
            )
            assert set(drafts.flatten().tolist()) <= set(allowed.tolist())
        base = drafter.base_logits(target, hidden)
        torch.testing.assert_close(base, target.logits(hidden)[..., allowed])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2], r"draft_tokens has shape \(2,\); expected \(3,\)"),
        ([1, 2, 97], r"draft_tokens\[2\] is target id 97, outside the vocabulary; expected diff"),
        ([1, 2, 2], r"draft_tokens\[2\] is target id 2, a second time; .* id of its own"),
        ([1, -1, 2], r"draft_tokens\[1\] is target id -1, outside"),
    ],
    ids=["short", "outside", "twice", "below"],
)
def test_a_broken_map_of_a_reduced_vocabulary_is_an_error(tokens, words):
    with pytest.raises(ConfigError, match=words):
        DraftModel(drafter_config(draft_vocab_size=3), torch.tensor(tokens))


def test_logits_from_another_device_come_back_to_the_drafter():
    class Elsewhere:
        def embed(self, tokens):
            return torch.zeros(*tokens.shape, 32)

        def logits(self, hidden, tokens=None):
            class Moved(torch.Tensor):
                def to(self, *place):
                    seen.append(place)
                    return self.as_subclass(torch.Tensor)

            return torch.zeros(*hidden.shape[:-1], VOCAB).as_subclass(Moved)

    seen = []
    drafter = random_drafter()
    drafter.base_logits(Elsewhere(), torch.zeros(1, 3, 32))
    assert seen == [(drafter.device,)]


@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (True, 0), (False, 0)])
def test_built_drafter_knows_its_bigram_target(shift, prefix):
    target, drafter = bigram_target(), knowing_drafter(shift=shift, prefix=prefix)
    anchor = 11
    expected = [int(successor()[anchor])]
    while len(expected) < drafter.config.max_depth:
        expected.append(int(successor()[expected[-1]]))
    with torch.no_grad():
        hidden = drafter.block_hidden(
            target,
            captured=torch.randn(1, 5, 2 * 40),
            tokens=torch.tensor([[1, 2, 3, 4, anchor]]),
            anchors=torch.tensor([[4]]),
            positions=torch.arange(5).unsqueeze(0),
            documents=None,
        )[:, 0]
        drafts = rollout(drafter, target, hidden=hidden, anchor_tokens=torch.tensor([anchor]))
    assert drafts[0].tolist() == expected
