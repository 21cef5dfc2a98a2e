"""A target that is a table of bigrams, and drafters that know it: every draft must be accepted.

As `tests.support.pair`, in sizes that an engine's kernels take.
"""

from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from domino_spec.checkpoints import save_drafter
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel

VOCAB, HIDDEN, MASK, CONSTANT = 64, 128, 63, 64
SHARP = 20.0


def successor() -> Tensor:
    """The next token of each: one cycle through all tokens but the mask, which follows itself."""
    order = torch.randperm(MASK, generator=torch.Generator().manual_seed(0))
    after = torch.full((VOCAB,), MASK)
    after[order] = order.roll(-1)
    return after


def save_bigram_target(folder: Path, *, lively: bool = False) -> Path:
    """A Llama whose layers do nothing: its answer depends on the last token alone.

    A lively one has random layers instead, which everything before the token goes through.
    """
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same model in every process
        model = transformers.LlamaForCausalLM(config)
    if lively:
        enliven(model)
        model.save_pretrained(folder)
        return folder
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embeddings())
        model.lm_head.weight.zero_()
        model.lm_head.weight[successor(), torch.arange(VOCAB)] = 1.0
    model.to(torch.float32).save_pretrained(folder)
    return folder


def enliven(model: torch.nn.Module) -> None:
    """Matrices of a scale at which all that came before a token changes what follows it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)


def table_answer(prompt: list[int], length: int) -> list[int]:
    """What the bigram table says after a prompt."""
    after, answer = successor().tolist(), []
    for _ in range(length):
        answer.append(after[(prompt + answer)[-1]])
    return answer


def embeddings() -> Tensor:
    """Each token a direction of its own, and one that all share."""
    table = torch.zeros(VOCAB, HIDDEN)
    table[torch.arange(VOCAB), torch.arange(VOCAB)] = 1.0
    table[:, CONSTANT] = 1.0
    return table


def knowing_drafter(*, shift_label: bool, prefix_len: int, block_size: int = 8) -> DraftModel:
    """Its backbone passes embeddings on, its GRU remembers the last token, its head the table."""
    config = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=32, vocab_size=VOCAB, num_target_layers=3, target_layer_ids=(0, 2),
        mask_token_id=MASK, block_size=block_size, shift_label=shift_label,
        max_position_embeddings=512,
        head=DominoHeadConfig(
            emb_dim=VOCAB, gru_hidden_dim=VOCAB, pure_draft_prefix_len=prefix_len
        ),
    )  # fmt: skip
    drafter = DraftModel.untrained(config)
    state = drafter.state_dict()
    eye = torch.eye(VOCAB)
    with torch.no_grad():
        for name, tensor in state.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            if name.startswith("head."):
                tensor.zero_()
        inputs = state["head.prefix_gru.weight_ih_l0"].view(3, VOCAB, HIDDEN)
        inputs[1, :, CONSTANT] = -SHARP  # nothing of the old state stays
        inputs[2, :, :VOCAB] = SHARP * eye  # the new one is the token itself
        state["head.embed_proj.0.weight"][:, HIDDEN:] = SHARP * eye
        state["head.embed_proj.2.weight"][successor(), torch.arange(VOCAB)] = SHARP
    return drafter


def save_knowing_drafter(
    folder: Path, *, shift_label: bool, prefix_len: int, head: bool = True
) -> Path:
    """In the public layout; without its head it is a plain DFlash drafter that knows nothing."""
    drafter = knowing_drafter(shift_label=shift_label, prefix_len=prefix_len)
    if not head:
        bare = DraftModel(replace(drafter.config, head=None))
        bare.backbone.load_state_dict(drafter.backbone.state_dict())
        drafter = bare
    return save_drafter(drafter, folder, dtype=torch.float32)


def save_random_drafter(
    folder: Path, *, seed: int, dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[Path, DraftModel]:
    """Random weights of a scale at which context and prefix change the drafts.

    A reduced vocabulary is a random one too, in no order. The drafter computes in float32 with
    what `dtype` holds of its weights.
    """
    shape = replace(knowing_drafter(shift_label=True, prefix_len=1).config, **changes)
    drafter = DraftModel.untrained(shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)  # norms: each layer its own
        if drafter.head is not None:
            drafter.head.output_weight.mul_(8.0)
    if drafter.draft_tokens is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
        drafter.draft_tokens.copy_(order[: len(drafter.draft_tokens)])
    drafter.to(dtype)
    return save_drafter(drafter, folder, dtype=dtype), drafter.float()
