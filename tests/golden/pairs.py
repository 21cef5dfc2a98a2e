"""Tiny float64 targets and drafters of every kind, whose drafts are right now and then."""

from __future__ import annotations

import torch
import transformers as tf

from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    DraftModel,
    Eagle3,
    Eagle3Config,
    MarkovHeadConfig,
    Medusa,
    MedusaConfig,
)
from domino_spec.targets import Target, probe_target

VOCAB = 12
KINDS = ("domino", "dflash", "markov", "medusa", "eagle3", "lookup")
FAMILIES = {
    "llama": lambda **common: tf.LlamaConfig(**common),
    "qwen3": lambda **common: tf.Qwen3Config(**common, head_dim=8),
}
LENGTHS = (5, 17, 9)
SETTINGS = {
    "greedy": {"max_new_tokens": 40},
    "sampled": {"max_new_tokens": 40, "temperature": 0.8, "seed": 7, "accept": "coupled"},
    "filtered": {
        "max_new_tokens": 40, "temperature": 0.9, "top_p": 0.9, "top_k": 8, "seed": 11,
        "presence_penalty": 0.2, "accept": "coupled",
    },
}  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB - 1, (n,), generator=generator).tolist() for n in LENGTHS]


def target_of(family: str) -> Target:
    config = FAMILIES[family](
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = _drawn(tf.AutoModelForCausalLM.from_config(config).eval(), 1.0, seed=8).double()
    target = Target(model, name=family)
    probe_target(target)
    return target


def model_of(kind: str) -> torch.nn.Module | None:
    """None for prompt lookup, which has no weights."""
    shape = {"hidden_size": 16, "vocab_size": VOCAB, "num_target_layers": 4}
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 32}
    if kind == "lookup":
        return None
    if kind == "medusa":
        return _drawn(Medusa(MedusaConfig(**shape, num_heads=4)).eval(), 0.4, seed=6).double()
    if kind == "eagle3":
        config = Eagle3Config(**shape, **heads, tapped_layers=(0, 1, 3), unrolled=4)
        return _drawn(Eagle3(config).eval(), 0.4, seed=6).double()
    head = {
        "domino": DominoHeadConfig(gru_hidden_dim=8, emb_dim=8, pure_draft_prefix_len=1),
        "markov": MarkovHeadConfig(emb_dim=8, pure_draft_prefix_len=0),
        "dflash": None,
    }[kind]
    config = DrafterConfig(
        **shape, **heads, num_layers=1, target_layer_ids=(0, 3), mask_token_id=VOCAB - 1,
        block_size=5, shift_label=kind != "dflash", head=head,
    )  # fmt: skip
    return _drawn(DraftModel(config).eval(), 0.4, seed=6).double()


def _drawn(module, scale: float, *, seed: int):
    """Matrices and biases drawn by a generator of our own: the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module
