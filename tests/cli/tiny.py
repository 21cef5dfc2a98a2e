"""A tiny random chat model with a real tokenizer, and drafters for it, as folders."""

from __future__ import annotations

from pathlib import Path

import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from domino_spec.checkpoints import Provenance, save_drafter
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from tests.support.families import randomise

VOCAB, HIDDEN, LAYERS, CONTEXT = 300, 32, 3, 256
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|mask|>"]
MASK = SPECIALS.index("<|mask|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = ["the quick brown fox jumps over the lazy dog", "what is the answer to the question"]


def make_tokenizer(*, template: bool = True) -> tf.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 4, trainer)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_target(folder: Path, *, hidden: int = HIDDEN, tokenizer: object | None = None) -> Path:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = randomise(tf.LlamaForCausalLM(config).eval(), 0.25, seed=1)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def drafter_config(*, hidden: int = HIDDEN, head: bool = True) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=hidden, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, vocab_size=VOCAB, num_target_layers=LAYERS, target_layer_ids=(0, 2),
        mask_token_id=MASK, block_size=8, shift_label=head,
        head=DominoHeadConfig(gru_hidden_dim=16, emb_dim=8, pure_draft_prefix_len=1)
        if head
        else None,
    )  # fmt: skip


def save_draft(folder: Path, provenance: Provenance | None = None, **shape: object) -> Path:
    return save_drafter(
        DraftModel.untrained(drafter_config(**shape)), folder, provenance=provenance
    )
