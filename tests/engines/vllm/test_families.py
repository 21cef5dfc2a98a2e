"""Exports for targets of each family that vLLM can capture hidden states of: its drafts are ours.

The names of captured layers, and whether a state is taken before or after a norm, are each model
file's own in vLLM, as they are in Transformers. Drafts show whether both mean the same.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf

from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import HIDDEN, MASK, VOCAB, enliven, save_random_drafter
from tests.engines.vllm.test_v1 import HEAD, assert_drafts_are_ours, speculative
from tests.support.families import plain_greedy

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_HEADS = {**_COMMON, "head_dim": 32}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
ENGINE = {"disable_hybrid_kv_cache_manager": True}
"""Else vLLM may sort a drafter's layers into several groups, where a target's differ: refused."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

SERVED: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen2": lambda: tf.Qwen2Config(**_COMMON),
    "qwen3": lambda: tf.Qwen3Config(**_HEADS),
    # Where all layers slide vLLM's drafter sees no further either: not what it was trained on.
    "mistral": lambda: tf.MistralConfig(**_HEADS, sliding_window=64),
    "smollm3": lambda: tf.SmolLM3Config(**_COMMON, no_rope_layer_interval=2),
    "olmo2": lambda: tf.Olmo2Config(**_COMMON),
    "olmo3": lambda: tf.Olmo3Config(**_COMMON, sliding_window=16, layer_types=_MIXED),
    "phi3": lambda: tf.Phi3Config(**_COMMON),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_HEADS, **_EXPERTS, norm_topk_prob=True),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
}
REFUSED: dict[str, tuple[Callable[[], tf.PretrainedConfig], str]] = {
    "gemma3": (
        lambda: tf.Gemma3TextConfig(**_HEADS, sliding_window=16, layer_types=_MIXED),
        "Model does not support EAGLE3",  # vLLM's own words: it has no hidden states to give
    ),
    "granite": (
        lambda: tf.GraniteConfig(**_COMMON, embedding_multiplier=3.0, logits_scaling=4.0),
        "the target scales its embeddings or logits",
    ),
}


def save_target(config: tf.PretrainedConfig, folder: Path) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    enliven(model)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", SERVED)
def test_drafts_are_those_of_our_own_rollout(family, tmp_path):
    target = save_target(SERVED[family](), tmp_path / "target")
    draft, drafter = save_random_drafter(tmp_path / "draft", seed=6, head=HEAD)
    tokens = assert_drafts_are_ours(target, draft, drafter, engine=ENGINE)
    model = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert tokens[5:] == plain_greedy(model, tokens[:5], 32)


@pytest.mark.parametrize("family", REFUSED)
def test_other_targets_are_refused(family, tmp_path):
    config, reason = REFUSED[family]
    target = save_target(config(), tmp_path / "target")
    draft, _ = save_random_drafter(tmp_path / "draft", seed=6, head=HEAD)
    with pytest.raises(AssertionError, match=reason):
        run_job(target=target, speculative=speculative(draft), prompts=[[1, 2, MASK - 1]])
