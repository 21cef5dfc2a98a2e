"""A target with few tokens, and a drafter that is right about as often as wrong."""

from __future__ import annotations

import transformers as tf

from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.targets import Target, probe_target
from tests.support.families import randomise

VOCAB = 12


def small_pair() -> tuple[Target, DraftModel]:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.5, seed=5)
    target = Target(model)
    probe_target(target)
    config = DrafterConfig(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2,
        head_dim=8, vocab_size=VOCAB, num_target_layers=2, target_layer_ids=(0, 1),
        mask_token_id=11, block_size=4, shift_label=True,
        head=DominoHeadConfig(gru_hidden_dim=8, emb_dim=8, pure_draft_prefix_len=1),
    )  # fmt: skip
    return target, randomise(DraftModel(config).eval(), 0.4, seed=6)
