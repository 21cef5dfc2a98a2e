"""A head's rollout in one compiled call is the rollout of the same rounded weights."""

import pytest
import torch

from domino_spec.checkpoints import load_drafter
from domino_spec.drafter.config import DominoHeadConfig
from domino_spec.drafter.heads import DominoHead
from domino_spec.drafter.rollout import roll
from domino_spec.quantization import QuantizedWeight, compiled
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.drafts import DraftRollout

pytestmark = pytest.mark.skipif(kernel() is None, reason="there is no compiler")
LEVEL = 0.02
"""How far a number that rounds to the next of 8 bits may move a logit, of the logits' size."""


class Rounded:
    """A head whose products are those of its rounded weights, for `roll`."""

    def __init__(self, head: DominoHead) -> None:
        self.prefix_len, self._size = head.prefix_len, head.state_size
        self.weights = {
            name: QuantizedWeight.quantize(weight, "Q8_0")
            for name, weight in head.matrices().items()
        }

    def initial_state(self, batch, like):
        return torch.zeros(batch, self._size)

    def project_hidden(self, hidden):
        return self.weights["hidden"].linear(hidden)

    def step(self, token, state, embed):
        inputs = self.weights["input"].linear(embed(token)).chunk(3, dim=-1)
        carried = self.weights["carried"].linear(state).chunk(3, dim=-1)
        reset, update = (torch.sigmoid(inputs[i] + carried[i]) for i in (0, 1))
        new = torch.tanh(inputs[2] + reset * carried[2])
        return new + update * (state - new)

    def correction(self, projected, state, tried):
        active = torch.nn.functional.silu(projected + self.weights["prefix"].linear(state))
        return self.weights["output"].linear(active)


def random_head(prefix: int) -> tuple[DominoHead, int]:
    config = DominoHeadConfig(gru_hidden_dim=64, emb_dim=32, pure_draft_prefix_len=prefix)
    head = DominoHead(config, hidden_size=96, output_vocab_size=203).requires_grad_(False)
    generator = torch.Generator().manual_seed(prefix)
    for weight in head.parameters():
        weight.normal_(0.0, 0.3, generator=generator)
    return head, 203


def released_head(_prefix: int) -> tuple[DominoHead, int]:
    head = load_drafter("released:smollm2-135m-instruct-cpu").drafter.head
    return head.float().requires_grad_(False), len(head.output_weight)


@pytest.mark.parametrize(
    ("made", "prefix", "batch", "threads", "tokens"),
    [
        (random_head, 0, 1, 1, False),
        (random_head, 1, 3, 3, True),
        (random_head, 3, 11, 2, True),
        (released_head, 1, 1, 2, True),
    ],
)
@torch.no_grad()
def test_drafts_are_the_reference_rollouts(made, prefix, batch, threads, tokens, monkeypatch):
    """Up to near-ties: what follows another token is not compared."""
    monkeypatch.setattr(compiled, "_GRAIN", 1)
    monkeypatch.setattr(compiled, "_processors", lambda: 3)
    head, rows = made(prefix)
    width, depth, vocabulary = head.hidden_size, 7, 2 * rows if tokens else rows
    draw = torch.Generator().manual_seed(batch)
    embedding = QuantizedWeight.quantize(torch.randn(vocabulary, width, generator=draw), "Q8_0")
    ids = torch.randperm(vocabulary, generator=draw)[:rows] if tokens else None
    lm_head = embedding if ids is None else embedding[ids]
    bias = torch.randn(rows, generator=draw)
    hidden = torch.randn(batch, depth + 1, width, generator=draw)[:, :depth]
    anchors = torch.randint(0, vocabulary, (batch,), generator=draw)
    reference = Rounded(head)
    seen = []

    def choose(_index, logits, _tokens):
        seen.append(logits)
        return logits.argmax(dim=1)

    base = lm_head.linear(hidden, bias)
    expected = roll(
        reference, embedding.dequantize, hidden=hidden, anchor_tokens=anchors, base=base,
        columns=None, draft_tokens=ids, choose=choose,
    )  # fmt: skip
    weights = {"embedding": embedding, "lm_head": lm_head, **reference.weights}
    rollout = DraftRollout(kernel(), weights, bias=bias, tokens=ids, uncorrected=head.prefix_len)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.bfloat16)  # C writes float32 all the same
    try:
        found = [rollout.run(hidden, anchors) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[0], again) for again in found)
    base_alone = base.argmax(dim=2) if ids is None else ids[base.argmax(dim=2)]
    assert (expected != base_alone).any()  # the head matters
    names = list(range(rows)) if ids is None else ids.tolist()
    for row in range(batch):
        for index in range(depth):
            logits, token = seen[index][row], found[0][row, index].item()
            if token == expected[row, index].item():
                continue
            gap = logits.max() - logits[names.index(token)]
            assert gap < LEVEL * logits.abs().max(), (row, index)
            break
    assert (found[0] == expected).float().mean() > 0.9
