"""Exports for targets of each family that vLLM can capture hidden states of: its drafts are ours.

The names of captured layers, and whether a state is taken before or after a norm, are each model
file's own in vLLM, as they are in Transformers. Drafts show whether both mean the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from domino_spec.targets import load_target
from tests.engines.vllm.job import run_job
from tests.engines.vllm.pairs import HIDDEN, MASK, VOCAB, enliven, save_random_drafter
from tests.engines.vllm.reference import assert_nearly_ours
from tests.engines.vllm.test_v1 import BLOCK, HEAD, assert_drafts_are_ours, speculative
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
_VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_IMAGES = {
    "vision_start_token_id": 58, "vision_end_token_id": 59, "image_token_id": 60,
    "video_token_id": 61, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**_COMMON, "rope_parameters": _ROPE},
        vision_config={**_VISION, "window_size": 16, "fullatt_block_indexes": [0]},
        **_IMAGES,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config={**_HEADS, "rope_parameters": _ROPE},
        vision_config={
            **_VISION, "depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64
        },
        **_IMAGES,
    ),
}  # fmt: skip
TEXT_ALONE = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

_HYBRID = {
    **_HEADS, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRIDS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_HYBRID, **_EXPERTS, shared_expert_intermediate_size=64, norm_topk_prob=True
    ),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**_HYBRID),
    "qwen3_5_moe_text": lambda: tf.Qwen3_5MoeTextConfig(
        **_HYBRID, **_EXPERTS, shared_expert_intermediate_size=64
    ),
}
_TOWER = {**_VISION, "num_position_embeddings": 64}
PUBLISHED: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen3_5": lambda: tf.Qwen3_5Config(text_config=_HYBRID, vision_config=_TOWER, **_IMAGES),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeConfig(
        text_config={**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 64},
        vision_config=_TOWER,
        **_IMAGES,
    ),
}
"""With their vision towers."""
HYBRID_DRAFTER: dict[str, Any] = {
    "seed": 6, "dtype": torch.bfloat16, "head": HEAD, "num_target_layers": 4,
    "target_layer_ids": (0, 3),
}  # fmt: skip
OTHER_LAYERS = (0, 2)
ON_CPU = {"dtype": "bfloat16", "enable_prefix_caching": False}
"""What vLLM's linear attention needs there: bfloat16 is its kernels', and prefixes are Triton's."""

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


def save_target(
    config: tf.PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32
) -> str:
    sees = hasattr(config, "vision_config")
    kind = tf.AutoModelForImageTextToText if sees else tf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config).float().eval()
    enliven(model)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", SERVED)
def test_drafts_are_those_of_our_own_rollout(family, tmp_path):
    target = save_target(SERVED[family](), tmp_path / "target")
    draft, drafter = save_random_drafter(tmp_path / "draft", seed=6, head=HEAD)
    tokens = assert_drafts_are_ours(target, draft, drafter, engine=ENGINE)
    model = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert tokens[5:] == plain_greedy(model, tokens[:5], 32)


@pytest.mark.parametrize("family", VISION)
def test_drafts_after_text_of_a_target_that_reads_images(family, tmp_path):
    target = save_target(VISION[family](), tmp_path / "target")
    draft, drafter = save_random_drafter(tmp_path / "draft", seed=6, head=HEAD)
    tokens = assert_drafts_are_ours(
        target, draft, drafter, engine=TEXT_ALONE, without_torchvision=True
    )
    model = tf.AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    assert tokens[5:] == plain_greedy(model, tokens[:5], 32)


@pytest.mark.parametrize("family", [*HYBRIDS, *PUBLISHED])
def test_drafts_after_linear_attention(family, tmp_path):
    """Every cycle takes the states of the drafts it rejects back, or the text would differ."""
    config = {**HYBRIDS, **PUBLISHED}[family]()
    saved = save_target(config, tmp_path / "target", torch.bfloat16)
    draft, drafter = save_random_drafter(tmp_path / "draft", **HYBRID_DRAFTER)
    prompt = [9, 4, 17, 30, 2]
    result = run_job(
        target=saved,
        speculative=speculative(draft),
        prompts=[prompt],
        record=True,
        engine={**ON_CPU, **(TEXT_ALONE if family in PUBLISHED else {})},
        without_torchvision=True,
    )
    tokens = prompt + result["answers"][0][0][0]
    position, blocks = len(prompt), {}
    for block in result["blocks"]:
        assert block[0] == tokens[position]
        blocks[position] = block
        following = tokens[position + 1 :]
        same = [a == b for a, b in zip(block[1:], following, strict=False)]
        position += 1 + (same.index(False) if False in same else len(same))
        if position >= len(tokens):
            break
    assert len(blocks) > 20
    assert_nearly_ours(
        blocks,
        target=load_target(saved, device="cpu", dtype=torch.float32).target,
        drafter=drafter,
        tokens=tokens,
        first=len(prompt),
        depth=BLOCK - 1,
        other_layers=OTHER_LAYERS,
    )


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"dtype": "float32"}, "takes bfloat16 alone: say --dtype bfloat16"),
        ({"dtype": "bfloat16"}, "say --no-enable-prefix-caching"),
    ],
    ids=["float32", "prefix caching"],
)
def test_what_fails_later_with_linear_attention_on_a_cpu_is_refused(tmp_path, engine, words):
    target = save_target(HYBRIDS["qwen3_next"](), tmp_path / "target", torch.bfloat16)
    draft, _ = save_random_drafter(tmp_path / "draft", **HYBRID_DRAFTER)
    with pytest.raises(AssertionError, match=words):
        run_job(
            target=target, speculative=speculative(draft), prompts=[[1, 2, MASK - 1]], engine=engine
        )


@pytest.mark.parametrize("family", REFUSED)
def test_other_targets_are_refused(family, tmp_path):
    config, reason = REFUSED[family]
    target = save_target(config(), tmp_path / "target")
    draft, _ = save_random_drafter(tmp_path / "draft", seed=6, head=HEAD)
    with pytest.raises(AssertionError, match=reason):
        run_job(target=target, speculative=speculative(draft), prompts=[[1, 2, MASK - 1]])
