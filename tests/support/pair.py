"""A target that is a bigram table, and a drafter built to know it.

The target's attention and MLP add nothing, so its next token depends on the last one alone.
The drafter's backbone adds nothing either: a MASK slot knows nothing, and only a head that
reads the right prefix at the right slot can name the next token. Any misalignment of slots,
states or prefixes makes it fail.
"""

from __future__ import annotations

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

SIZE = 40  # tokens and dimensions: embeddings are one-hot
MASK = SIZE - 1


def successor(size: int = SIZE) -> torch.Tensor:
    """A fixed random permutation without short cycles through the mask, which comes last."""
    order = torch.randperm(size - 1, generator=torch.Generator().manual_seed(3))
    table = torch.empty(size, dtype=torch.long)
    table[order] = order.roll(-1)
    table[size - 1] = order[0]
    return table


def bigram_target(table: torch.Tensor | None = None) -> Target:
    """The target of a table: for each token the next one."""
    table = successor() if table is None else table
    size = len(table)
    config = tf.LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same model in every process
        model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[table, torch.arange(size)] = 1.0
    target = Target(model, name="bigram")
    probe_target(target)
    return target


def knowing_drafter(
    *,
    shift: bool,
    prefix: int,
    table: torch.Tensor | None = None,
    mask: int | None = None,
    head_dim: int = 10,
) -> DraftModel:
    """Knows a table; given a mask, its head is right in slots of that token alone."""
    table = successor() if table is None else table
    size = len(table)
    width = size if mask is None else size + 1  # one more unit: this slot is not the mask's
    head = DominoHeadConfig(gru_hidden_dim=size, emb_dim=width, pure_draft_prefix_len=prefix)
    drafter = _silent_backbone(
        head, shift=shift, size=size, mask=size - 1 if mask is None else mask, head_dim=head_dim
    )
    with torch.no_grad():
        gru = drafter.head.prefix_gru
        gru.weight_hh_l0.zero_()
        gru.weight_ih_l0.zero_()
        # Update gate at one half: the newest token always outweighs all before it.
        gru.weight_ih_l0[2 * size :] = 4.0 * torch.eye(size)
        first, _, second = drafter.head.embed_proj
        first.weight.zero_()
        first.weight[:size, size:] = 8.0 * torch.eye(size)
        second.weight.zero_()
        second.weight[table, torch.arange(size)] = 20.0
        if mask is not None:
            first.weight[size, :size] = 50.0
            first.weight[size, mask] = 0.0
            second.weight[table[mask], size] = 20.0
    return drafter


def knowing_markov_drafter(*, shift: bool) -> DraftModel:
    """The same knowledge as a table of bigrams."""
    drafter = _silent_backbone(MarkovHeadConfig(emb_dim=SIZE), shift=shift)
    with torch.no_grad():
        drafter.head.markov_w1.weight.copy_(torch.eye(SIZE))
        drafter.head.output_weight.zero_()
        drafter.head.output_weight[successor(), torch.arange(SIZE)] = 20.0
    return drafter


def _silent_backbone(
    head: HeadConfig, *, shift: bool, size: int = SIZE, mask: int = MASK, head_dim: int = 10
) -> DraftModel:
    config = DrafterConfig(
        hidden_size=size, intermediate_size=16, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=head_dim, vocab_size=size, num_target_layers=2, target_layer_ids=(0, 1),
        mask_token_id=mask, block_size=8, shift_label=shift,
        head=head,
    )  # fmt: skip
    drafter = DraftModel.untrained(config)
    with torch.no_grad():
        for layer in drafter.backbone.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return drafter
