"""Tiny random models of many families, with weights large enough to make every token count."""

from __future__ import annotations

from functools import cache

import torch
import transformers as tf

from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    DraftModel,
    HeadConfig,
    MarkovHeadConfig,
)
from domino_spec.targets import Target, probe_target

VOCAB, HIDDEN, LAYERS, MASK, CONTEXT = 97, 32, 3, 96, 256
HEADS = 2 if torch.cuda.is_available() else 4
HEAD_DIM = HIDDEN // HEADS  # a GPU's kernels take heads of 16 or wider

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_MLP = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Gemma's scaled embeddings, tied to its lm_head, would repeat the last token for ever.
_GEMMA = {**_COMMON, "head_dim": HEAD_DIM, "tie_word_embeddings": False}
# Value heads that share keys, and layers that sum up before and after one that attends.
_HYBRID = {
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Half of each head is rotated; past half of the context by other frequencies.
_LONGROPE = {
    "original_max_position_embeddings": CONTEXT // 2,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5] * (HEAD_DIM // 8), "long_factor": [3.0, 5.0] * (HEAD_DIM // 8),
    },
}  # fmt: skip
_MIXED = [*["sliding_attention"] * (LAYERS - 1), "full_attention"]
WINDOW = 6  # shorter than every test's sequence, so that sliding layers do slide

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_COMMON),
    "qwen2": lambda: tf.Qwen2Config(**_COMMON),
    "qwen3": lambda: tf.Qwen3Config(**_COMMON, head_dim=HEAD_DIM),
    "mistral": lambda: tf.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: tf.Gemma2Config(
        **_GEMMA, sliding_window=WINDOW, query_pre_attn_scalar=8
    ),
    "gemma3_text": lambda: tf.Gemma3TextConfig(
        **_GEMMA, sliding_window=WINDOW, layer_types=_MIXED,
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=CONTEXT,
        bos_token_id=1, eos_token_id=2,
    ),
    "granite": lambda: tf.GraniteConfig(
        **_COMMON, embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.6,
        attention_multiplier=0.2,
    ),
    "olmo2": lambda: tf.Olmo2Config(**_COMMON),
    "olmo3": lambda: tf.Olmo3Config(
        **_COMMON, sliding_window=WINDOW, layer_types=_MIXED,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                "original_max_position_embeddings": CONTEXT // 4,
            },
        },
    ),
    "phi3": lambda: tf.Phi3Config(**_COMMON, **_LONGROPE),
    "smollm3": lambda: tf.SmolLM3Config(**_COMMON, no_rope_layer_interval=2),
    "cohere": lambda: tf.CohereConfig(**_COMMON),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **_COMMON, head_dim=HEAD_DIM, **_MOE, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_COMMON, head_dim=HEAD_DIM, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=1.0,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_COMMON, **_HYBRID, **_MOE, shared_expert_intermediate_size=16
    ),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**_COMMON, **_HYBRID),
    "qwen3_5_moe_text": lambda: tf.Qwen3_5MoeTextConfig(
        **_NO_MLP, **_HYBRID, **_MOE, shared_expert_intermediate_size=16
    ),
}  # fmt: skip
HYBRIDS = ("qwen3_next", "qwen3_5_text")


def make_model(family: str, *, seed: int = 0, attention: str | None = None) -> tf.PreTrainedModel:
    options = {} if attention is None else {"attn_implementation": attention}
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), **options).float().eval()
    return slow_decay(randomise(model, 0.25, seed=seed))


def slow_decay(model):
    """Recurrent states that fade over tens of tokens, so that an error in one lasts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-5.0, -1.0, len(parameter)))
    return model


def randomise(module, scale: float, *, seed: int = 0):
    """Draw all matrices anew, so that outputs are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
    return module


@cache
def make_target(family: str) -> Target:
    target = Target(make_model(family), name=family)
    probe_target(target)
    return target


def drafter_config(
    *, shift: bool = True, head: bool | HeadConfig = True, prefix: int = 1, **changes
):
    if head is True:
        head = DominoHeadConfig(gru_hidden_dim=16, emb_dim=8, pure_draft_prefix_len=prefix)
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "target_layer_ids": (0, 2),
        "mask_token_id": MASK,
        "block_size": 8,
        "shift_label": shift,
        "head": head or None,
    }
    return DrafterConfig(**{**values, **changes})


def markov_head(*, prefix: int = 0) -> MarkovHeadConfig:
    return MarkovHeadConfig(emb_dim=8, pure_draft_prefix_len=prefix)


def random_drafter(config: DrafterConfig | None = None, *, seed: int = 0) -> DraftModel:
    """Weights large enough that the head changes many of the backbone's choices."""
    drafter = randomise(DraftModel(config or drafter_config()).eval(), 0.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:  # norms, so that leaving one out shows
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


def random_prompts(lengths, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def plain_greedy(model, prompt: list[int], count: int) -> list[int]:
    """What Transformers itself generates, one token a forward."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
