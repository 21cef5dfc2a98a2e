"""How many floating-point operations a training step needs: multiplications that must be done."""

from __future__ import annotations

from domino_spec.drafter import DominoHeadConfig, DraftModel
from domino_spec.targets import Target

BF16_PEAK = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}
"""Dense bfloat16 peak of a card, as its maker states it."""


def step_flops(
    target: Target, drafter: DraftModel, *, tokens: int, slots: int, labels: int, soft: bool
) -> float:
    """Operations of one forward and backward pass; attention scores are left out.

    Nothing recomputed counts twice, and the frozen lm_head has no weight gradient.
    """
    config = drafter.config
    hidden, vocabulary = config.hidden_size, config.output_vocab_size
    whole = sum(p.numel() for p in target.layers.parameters())
    reading = 2 * whole * tokens
    layer = sum(p.numel() for p in drafter.backbone.layers[0].parameters())
    kv = 2 * hidden * config.num_kv_heads * config.head_dim
    fuse = drafter.backbone.fc.weight.numel()
    block = 3 * 2 * layer * config.num_layers * slots
    context = 3 * 2 * (kv * config.num_layers + fuse) * tokens
    logits = 2 * hidden * vocabulary * labels
    loss = 2 * logits + (logits if soft else 0)
    head = 0.0
    if isinstance(config.head, DominoHeadConfig):
        gru = 3 * config.head.gru_hidden_dim * (hidden + config.head.gru_hidden_dim)
        first = config.head.emb_dim * (hidden + config.head.gru_hidden_dim)
        head = 3 * 2 * (gru * slots + first * labels)
    if config.head is not None:
        head += 3 * 2 * config.head.emb_dim * vocabulary * labels
    return float(reading + block + context + loss + head)
