"""Tiny GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.support.tokens import small_tokenizer
from tests.support.vocabularies import Vocabulary

HIDDEN, LAYERS, HEADS = 32, 3, 4


def write_gguf(
    path: Path,
    *,
    seed: int = 0,
    leave_out: str = "",
    vocabulary: Vocabulary | None = None,
    architecture: str = "llama",
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, str | int | float] | None = None,
    factors: Mapping[str, Sequence[float]] | None = None,
    name: str = "tiny",
    hidden: int = HIDDEN,
) -> Path:
    """A random model of 8-bit blocks; a Llama with a small byte-level tokenizer unless told.

    `kinds` are those of matrices by the last part of their names, such as attn_v; `metadata` are
    further keys, `factors` tensors of numbers such as rope_freqs. K-quants want a `hidden` size of
    whole blocks of 256.
    """
    if vocabulary is not None:
        architecture = vocabulary.architecture
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    for key, numbers in (factors or {}).items():
        writer.add_tensor(f"{key}.weight", np.array(numbers, dtype=np.float32))
    if architecture == "gemma3":
        writer.add_key_length(hidden // HEADS)
        writer.add_value_length(hidden // HEADS)
        writer.add_sliding_window(64)
    if vocabulary is None:
        size = _add_small_tokenizer(writer)
    else:
        size = _add_vocabulary(writer, vocabulary)
    writer.add_vocab_size(size)
    draw = np.random.default_rng(seed)
    for name, shape in _shapes(architecture, size, hidden).items():
        if name == leave_out:
            continue
        values = draw.normal(0.0, 0.3, shape).astype(np.float32)
        name = name if name.endswith(".bias") else f"{name}.weight"
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        else:
            wanted = (kinds or {}).get(name.split(".")[-2], "Q8_0")
            kind = gguf.GGMLQuantizationType[wanted]
            own = _k_quants(draw, shape, kind) if wanted[-1] == "K" else gguf.quantize(values, kind)
            writer.add_tensor(name, own, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _k_quants(
    draw: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """Any bytes are such blocks, which gguf cannot make; the values' mean is about zero."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    signed = kind == gguf.GGMLQuantizationType.Q6_K
    scales = [6e-5] if signed else [3e-4, 3e-4 * (7.5 if kind.name == "Q4_K" else 15.5)]
    header = np.array(scales, dtype=np.float16).view(np.uint8)
    blocks[..., size - 2 if signed else 0 :][..., : len(header)] = header
    return blocks.reshape(shape[0], -1)


def _shapes(architecture: str, size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    # Transformers does not read how wide Qwen3's heads are.
    head = 128 if architecture == "qwen3" else hidden // HEADS
    whole, half = HEADS * head, HEADS * head // 2
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (size, hidden), "output_norm": (hidden,)}
    if architecture != "gemma3":
        shapes["output"] = (size, hidden)
    for i in range(LAYERS):
        layer = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (whole, hidden),
            "attn_k": (half, hidden),
            "attn_v": (half, hidden),
            "attn_output": (hidden, whole),
            "ffn_gate": (2 * hidden, hidden),
            "ffn_up": (2 * hidden, hidden),
            "ffn_down": (hidden, 2 * hidden),
        }
        if architecture == "qwen2":
            layer |= {"attn_q.bias": (hidden,), "attn_k.bias": (half,), "attn_v.bias": (half,)}
        if architecture in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        if architecture == "gemma3":
            layer |= {"post_attention_norm": (hidden,), "post_ffw_norm": (hidden,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _add_small_tokenizer(writer: gguf.GGUFWriter) -> int:
    tokenizer = small_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = tokenizer.backend_tokenizer.to_str()
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
    return len(vocabulary)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> int:
    tokens = vocabulary.gguf_tokens()
    writer.add_tokenizer_model("gpt2" if vocabulary.byte_level else "llama")
    writer.add_tokenizer_pre(vocabulary.pre if vocabulary.byte_level else "default")
    writer.add_token_list([token.text for token in tokens])
    writer.add_token_types([token.type for token in tokens])
    if vocabulary.byte_level:
        writer.add_token_merges(list(vocabulary.merges))
    else:
        writer.add_token_scores([float(-i) for i in range(len(tokens))])
    ids = {
        writer.add_bos_token_id: vocabulary.bos,
        writer.add_eos_token_id: vocabulary.eos,
        writer.add_pad_token_id: vocabulary.pad,
        writer.add_unk_token_id: vocabulary.unk,
    }
    for add, text in ids.items():
        if text is not None:
            add(vocabulary.id(text))
    if vocabulary.add_bos is not None:
        writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_chat_template(vocabulary.template)
    return len(tokens)
