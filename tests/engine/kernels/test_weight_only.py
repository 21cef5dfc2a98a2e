"""Weight-only targets on the engine as a GPU runs them: every product by our kernel."""

import pytest
import torch
import transformers as tf

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels import packing
from domino_spec.targets import Target, probe_target
from tests.engine.runs import own, run_reference
from tests.support.families import randomise
from tests.support.quantized_checkpoints import write_checkpoint
from tests.targets.test_weight_only import load_as_it_is

SIZE, NEW = 64, 5
PROMPT = [4, 9, 4]


def model() -> tf.PreTrainedModel:
    """One layer, with heads of 16, which is as narrow as the kernels take."""
    config = tf.Qwen3Config(
        vocab_size=97, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        eos_token_id=None,
    )  # fmt: skip
    return randomise(tf.AutoModelForCausalLM.from_config(config), 0.12)


@pytest.mark.parametrize("form", ["awq", "fp8-block"])
@torch.no_grad()
def test_a_block_says_what_the_reference_loop_says(tmp_path, monkeypatch, device, form):
    """A whole text in one verified block: after each of its tokens the next one."""
    write_checkpoint(tmp_path, model(), form)
    target = Target(load_as_it_is(tmp_path, device=device), name="tiny")
    probe_target(target)
    texts, _, _ = run_reference(target, None, [PROMPT], max_new_tokens=NEW)
    monkeypatch.setattr(packing, "dequantized", None)  # few rows need no such copy
    engine = Engine(own(target), None, slots=1, capacity=24, pack=False, graphs=False)
    slot = torch.zeros(1, dtype=torch.long, device=device)
    tokens = torch.tensor([PROMPT + texts[0][:-1]], device=device)
    block = AttentionMetadata(slot, slot.clone(), tokens.shape[1])
    states, _ = engine.target.forward(tokens, block)
    said = engine.target.logits(states).argmax(-1).tolist()
    assert said[len(PROMPT) - 1 :] == texts[0]
