"""A small real tokenizer with a chat template."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|think|>"]
LINES = ["the quick brown fox jumps over the lazy dog", "a domino falls, then the next one falls"]


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, at most 97 tokens over a reduced alphabet, `<|end|>` ends a sequence (id 2)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(LINES * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        unk_token="<|pad|>",
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast
