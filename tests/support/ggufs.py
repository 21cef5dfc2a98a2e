"""Tiny GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.tokens import small_tokenizer

HIDDEN, INNER, LAYERS, HEADS = 32, 64, 3, 4


def write_gguf(path: Path, *, seed: int = 0, leave_out: str = "") -> Path:
    """A random Llama of 8-bit blocks with a byte-level tokenizer."""
    tokenizer = small_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = tokenizer.backend_tokenizer.to_str()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    pairs = json.loads(merges)["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    special = {tokenizer.convert_tokens_to_ids(t) for t in tokenizer.all_special_tokens}
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocabulary))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    draw = np.random.default_rng(seed)
    half = HIDDEN // 2
    shapes = {"token_embd": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    shapes["output"] = (len(vocabulary), HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (half, HIDDEN),
            f"blk.{i}.attn_v": (half, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    for name, shape in shapes.items():
        if name == leave_out:
            continue
        values = draw.normal(0.0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
