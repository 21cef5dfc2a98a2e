"""Drafts on the device are those of `drafter.rollout`."""

import pytest
import torch
from torch.nn import functional as F

from domino_spec.drafter.heads import DominoHeadConfig, MarkovHeadConfig, build_head
from domino_spec.drafter.rollout import rollout
from domino_spec.engine.kernels import rollout as kernels
from domino_spec.engine.kernels import rollout_candidates, rollout_vocabulary
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.packing import ScaledEmbedding

HIDDEN, VOCABULARY, DEPTH, ROWS = 24, 90, 4, 2
REDUCED = 70


class Drafter:
    """What the oracle asks of a drafter and its target, with heads that matter."""

    def __init__(self, kind, prefix, reduced, device, *, gru=20, rank=40):
        torch.manual_seed(7)
        output = REDUCED if reduced else VOCABULARY
        sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "output_vocab_size": output}
        configs = {
            "domino": DominoHeadConfig(
                emb_dim=rank, gru_hidden_dim=gru, pure_draft_prefix_len=prefix
            ),
            "markov": MarkovHeadConfig(emb_dim=rank, pure_draft_prefix_len=prefix),
        }
        self.head = build_head(configs[kind], **sizes).to(device) if kind in configs else None
        if self.head is not None:
            for parameter in self.head.parameters():  # the same numbers on every device
                parameter.data = torch.randn(parameter.shape).to(device) * 0.4
        self.draft_tokens = torch.randperm(VOCABULARY)[:REDUCED].to(device) if reduced else None
        self.embedding = torch.randn(VOCABULARY, HIDDEN).to(device)
        self.lm_head = torch.randn(output, HIDDEN).to(device)

    def embed(self, _target, tokens):
        return F.embedding(tokens, self.embedding)

    def base_logits(self, _target, hidden):
        return hidden @ self.lm_head.T

    def inputs(self, device, depth=DEPTH, rows=ROWS):
        hidden = torch.randn(rows, depth, HIDDEN, generator=torch.Generator().manual_seed(3))
        anchors = torch.tensor([4, 77, 12])[:rows]
        return {"hidden": hidden.to(device), "anchor_tokens": anchors.to(device)}

    def rolled(self, given, candidates, **noise):
        base, columns = self.base_logits(None, given["hidden"]), None
        if candidates is not None:
            base, columns = base.topk(candidates, dim=-1)
        drafts, self.logits = kernels.roll_out(
            self.head,
            embedding=self.embedding,
            base=base,
            columns=columns,
            draft_tokens=self.draft_tokens,
            **given,
            noise=Noise(**noise) if noise else None,
            keep=True,
        )
        return drafts


@pytest.fixture(params=["kernel", "reference"])
def how(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    monkeypatch.setattr(rollout_vocabulary, "PROGRAMS", 3)
    return request.param


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "prefix", "candidates", "reduced"),
    [
        ("domino", 0, 12, False),
        ("domino", 1, 12, True),
        ("domino", 1, None, False),
        ("domino", 0, None, True),
        ("markov", 0, 12, True),
        ("markov", 1, 12, False),
        ("markov", 1, None, True),
        ("none", 0, 12, False),
        ("none", 1, None, True),
    ],
)
def test_greedy_drafts_are_the_oracles(how, device, kind, prefix, candidates, reduced):
    drafter = Drafter(kind, prefix, reduced, device)
    given = drafter.inputs(device)
    expected = rollout(drafter, None, candidates=candidates, **given)
    assert torch.equal(drafter.rolled(given, candidates), expected)
    base = drafter.base_logits(None, given["hidden"]).argmax(dim=-1)
    if drafter.draft_tokens is not None:
        base = drafter.draft_tokens[base]
    # The head is felt, but not where it must not be.
    assert torch.equal(expected, base) == (kind == "none")
    assert torch.equal(expected[:, :prefix], base[:, :prefix])


@torch.no_grad()
@pytest.mark.parametrize(
    ("candidates", "prefix", "depth"),
    [(12, 0, 1), (12, 1, 2), (12, 9, 2), (None, 1, 1), (None, 0, 2), (None, 9, 2)],
)
def test_short_blocks(how, device, candidates, prefix, depth):
    drafter = Drafter("domino", prefix, False, device)
    given = drafter.inputs(device, depth, rows=1)
    expected = rollout(drafter, None, candidates=candidates, **given)
    assert torch.equal(drafter.rolled(given, candidates), expected)


@torch.no_grad()
@pytest.mark.parametrize(("candidates", "reduced"), [(32, True), (None, False), (None, True)])
def test_drawn_drafts_equal_the_references(device, candidates, reduced, monkeypatch):
    monkeypatch.setattr(rollout_vocabulary, "PROGRAMS", 3)
    drafter = Drafter("domino", 1, reduced, device, gru=32, rank=64)
    given = drafter.inputs(device)
    noise = {
        "temperature": torch.tensor([0.0, 3.0], device=device),
        "seeds": torch.tensor([2**40 + 3, 2**33 + 11], device=device),
        "positions": torch.tensor([9, 30], device=device),
    }
    greedy = drafter.rolled(given, candidates)
    drafts = drafter.rolled(given, candidates, **noise)
    logits = drafter.logits
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    assert torch.equal(drafts, drafter.rolled(given, candidates, **noise))
    assert logits.shape == (ROWS, DEPTH, candidates or drafter.lm_head.shape[0])
    torch.testing.assert_close(logits, drafter.logits)  # what rejection holds drafts against
    assert torch.equal(drafts[0], greedy[0])
    assert not torch.equal(drafts[1], greedy[1])


@torch.no_grad()
def test_a_draw_is_of_its_position_and_token_alone(device):
    """What couples a draft with the target's own choice: the same logits choose the same."""
    drafter = Drafter("none", 0, False, device)
    given = drafter.inputs(device)
    noise = Noise(
        torch.full((ROWS,), 1.5, device=device),
        torch.tensor([5, 6], device=device),
        torch.tensor([100, 200], device=device),
    )
    everything = drafter.rolled(given, None, **noise._asdict())
    shuffled = torch.randperm(VOCABULARY, device=device)
    drafts, _ = kernels.rollout_reference(
        None,
        drafter.embedding,
        **given,
        base=drafter.base_logits(None, given["hidden"])[..., shuffled],
        columns=shuffled.expand(ROWS, DEPTH, -1),
        draft_tokens=None,
        noise=noise,
    )
    assert torch.equal(drafts, everything)


@pytest.mark.parametrize("candidates", [None, 8])
def test_an_embedding_is_read_with_its_factor(device, candidates, monkeypatch):
    monkeypatch.setattr(rollout_vocabulary, "PROGRAMS", 3)
    drafter = Drafter("domino", 0, False, device)
    given, plain = drafter.inputs(device), drafter.embedding
    with torch.no_grad():
        unscaled = drafter.rolled(given, candidates)
        drafter.embedding = plain * 4.0
        expected = rollout(drafter, None, candidates=candidates, **given)
        drafter.embedding = ScaledEmbedding(plain, 4.0)
        assert torch.equal(drafter.rolled(given, candidates), expected)
    assert not torch.equal(unscaled, expected)


def test_many_rows_go_through_pytorch(device, monkeypatch):
    monkeypatch.setattr(rollout_candidates, "MAX_ROWS", 1)
    monkeypatch.setattr(rollout_candidates, "launch", None)
    drafter = Drafter("domino", 0, False, device)
    given = drafter.inputs(device)
    with torch.no_grad():
        expected = rollout(drafter, None, candidates=8, **given)
        assert torch.equal(drafter.rolled(given, 8), expected)


def test_on_a_gpu_a_domino_head_looks_at_the_best_candidates_unless_told(device, monkeypatch):
    hidden = torch.zeros(1, DEPTH, HIDDEN, device=device)
    domino, markov = (Drafter(kind, 0, False, device).head for kind in ("domino", "markov"))
    assert kernels.default_candidates(domino, hidden) == kernels.CANDIDATES
    assert kernels.default_candidates(markov, hidden) is None
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    assert kernels.default_candidates(domino, hidden) is None
