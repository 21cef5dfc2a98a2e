"""Reading whole sequences: packed, padded or alone, a document's states are the same."""

import pytest
import torch
import transformers as tf

from domino_spec.errors import TargetError
from domino_spec.targets import Target, probe_target, read
from tests.support.families import CONFIGS, VOCAB, make_model, make_target, randomise
from tests.training.helpers import batch_of

CAPTURE_LAYERS = (0, 2)
ROWS = [[(4, 9), (2, 12), (1, 6)], [(3, 25)], [(2, 8), (2, 17)]]
LENGTH = 40


def packed():
    return batch_of(ROWS, length=LENGTH, vocab=VOCAB, seed=2)


def read_packed(target, batch, capture_layers=CAPTURE_LAYERS):
    return read(
        target,
        batch.tokens,
        capture_layers=capture_layers,
        positions=batch.positions,
        documents=batch.documents,
    )


def documents_of(batch):
    """(row, where) of every document."""
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row].max()) + 1):
            yield row, (batch.documents[row] == number).nonzero().squeeze(1)


@torch.no_grad()
def alone(target, tokens, capture_layers=CAPTURE_LAYERS):
    """Layer outputs and logits of one sequence, from the model's own forward and plain hooks."""
    caught = {}
    hooks = [
        target.layers[layer].register_forward_hook(
            lambda _m, _a, out, layer=layer: caught.update(
                {layer: out[0] if type(out) is tuple else out}
            )
        )
        for layer in capture_layers
    ]
    logits = target.model(input_ids=tokens.unsqueeze(0), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.cat([caught[layer] for layer in capture_layers], dim=-1)[0], logits[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_are_read_as_if_alone(family):
    target, batch = make_target(family), packed()
    reading = read_packed(target, batch)
    assert reading.captured.shape == (3, LENGTH, len(CAPTURE_LAYERS) * target.hidden_size)
    logits = target.logits(reading.hidden)
    for row, place in documents_of(batch):
        captured, own = alone(target, batch.tokens[row, place])
        torch.testing.assert_close(reading.captured[row, place], captured, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(logits[row, place], own, atol=2e-4, rtol=2e-4)


def test_eager_attention_takes_the_packed_mask_too():
    batch = packed()
    target = Target(make_model("gemma2", attention="eager"), name="eager")
    probe_target(target)
    reading = read_packed(target, batch)
    for row, place in documents_of(batch):
        captured, own = alone(target, batch.tokens[row, place])
        torch.testing.assert_close(reading.captured[row, place], captured, atol=2e-4, rtol=2e-4)
        logits = target.logits(reading.hidden[row, place])
        torch.testing.assert_close(logits, own, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_mask_that_lets_documents_see_each_other_is_noticed(family):
    target, batch = make_target(family), packed()
    right = read_packed(target, batch)
    wrong = read(
        target,
        batch.tokens,
        capture_layers=CAPTURE_LAYERS,
        positions=batch.positions,
        documents=torch.zeros_like(batch.documents),
    )
    second = batch.documents[0] == 1
    assert (right.captured[0, second] - wrong.captured[0, second]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_rows_of_one_document_need_no_mask_and_padding_is_harmless(family):
    target = make_target(family)
    batch = batch_of([[(3, 12)], [(5, 30)], [(2, 20)]], length=LENGTH, vocab=VOCAB)
    plain = read(target, batch.tokens, capture_layers=CAPTURE_LAYERS, positions=batch.positions)
    masked = read_packed(target, batch)
    other = batch.tokens.clone()
    other[batch.documents < 0] = 1
    repadded = read(target, other, capture_layers=CAPTURE_LAYERS, positions=batch.positions)
    for row, place in documents_of(batch):
        for reading in (
            masked,
            repadded,
            read(target, batch.tokens, capture_layers=CAPTURE_LAYERS),
        ):
            torch.testing.assert_close(
                reading.captured[row, place], plain.captured[row, place], atol=2e-4, rtol=2e-4
            )
            torch.testing.assert_close(
                reading.hidden[row, place], plain.hidden[row, place], atol=2e-4, rtol=2e-4
            )
        captured, own = alone(target, batch.tokens[row, place])
        torch.testing.assert_close(plain.captured[row, place], captured, atol=2e-4, rtol=2e-4)
        logits = target.logits(plain.hidden[row, place])
        torch.testing.assert_close(logits, own, atol=2e-4, rtol=2e-4)


def test_a_model_that_no_mask_reaches_is_read_document_by_document():
    config = tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=6, n_head=4)
    target = Target(randomise(tf.BloomForCausalLM(config).float().eval(), 0.25), name="bloom")
    probe_target(target)
    assert target.batch_refusal
    batch = packed()
    reading = read_packed(target, batch)
    assert reading.captured.shape == (3, LENGTH, len(CAPTURE_LAYERS) * 32)
    assert reading.hidden.shape == (3, LENGTH, 32)
    for row, place in documents_of(batch):
        captured, own = alone(target, batch.tokens[row, place])
        torch.testing.assert_close(reading.captured[row, place], captured, atol=2e-4, rtol=2e-4)
        logits = target.logits(reading.hidden[row, place])
        torch.testing.assert_close(logits, own, atol=2e-4, rtol=2e-4)


def test_attention_that_takes_no_mask_is_refused_by_name(monkeypatch):
    target = Target(make_model("llama"), name="flash")
    monkeypatch.setattr(target.model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(TargetError, match="flash_attention_2.*sdpa"):
        read_packed(target, packed())


def test_the_lm_head_is_left_as_it_was():
    target = Target(make_model("llama"), name="own")
    before = dict(target.lm_head.__dict__)
    tokens = torch.tensor([[5, 6, 7]])
    wanted = target.model(input_ids=tokens).logits
    read(target, tokens, capture_layers=CAPTURE_LAYERS)
    assert dict(target.lm_head.__dict__) == before
    assert target.model(input_ids=tokens).logits.equal(wanted)


def test_the_lm_head_is_left_as_it_was_after_an_error():
    target = Target(make_model("llama"), name="own")
    tokens = torch.tensor([[5, 6, 7]])
    wanted = target.model(input_ids=tokens).logits

    def fails(*_):
        raise RuntimeError("in the middle")

    hook = target.layers[2].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        read(target, tokens, capture_layers=CAPTURE_LAYERS)
    hook.remove()
    assert "forward" not in target.lm_head.__dict__
    assert not any(layer._forward_hooks for layer in target.layers)
    assert target.model(input_ids=tokens).logits.equal(wanted)


def test_a_forward_that_someone_else_put_on_the_lm_head_comes_back():
    target = Target(make_model("llama"), name="own")
    lm_head = target.lm_head
    theirs = type(lm_head).forward.__get__(lm_head)
    object.__setattr__(lm_head, "forward", theirs)
    read(target, torch.tensor([[5, 6, 7]]), capture_layers=CAPTURE_LAYERS)
    assert lm_head.__dict__["forward"] is theirs


def test_reading_leaves_no_graph_and_the_models_mode():
    target = Target(make_model("llama"), name="own")
    target.model.train()
    reading = read(target, torch.tensor([[5, 6, 7]]), capture_layers=CAPTURE_LAYERS)
    assert target.model.training
    assert not reading.captured.requires_grad
    assert not reading.hidden.requires_grad
