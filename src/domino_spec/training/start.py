"""Where a drafter starts: from another's weights, or at random, at the target's own scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domino_spec.baselines import BaselineConfig
from domino_spec.baselines.every import AnyDrafter, load_any
from domino_spec.baselines.files import MODELS
from domino_spec.data import Corpus
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.errors import TrainingError
from domino_spec.targets import Target, read
from domino_spec.training.config import BASELINES, TrainConfig
from domino_spec.training.sizes import (
    baseline_config,
    choose_draft_tokens,
    choose_mask_token,
    drafter_config,
)

_CONVERSATIONS = 16
# What a drafter to start from brings along: nobody can set it, and training does not change it.
_ITS_OWN = {
    "causal_window", "layer_types", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "sliding_window",
}  # fmt: skip


def start_drafter(
    config: TrainConfig, target: Target, tokenizer: Any, training: Corpus
) -> tuple[AnyDrafter, TrainConfig]:
    """Random weights, or those of `init`; and the configuration with its mask token."""
    shape: DrafterConfig | BaselineConfig
    if config.variant in BASELINES:
        shape = baseline_config(config, target)
    else:
        mask = _mask_token(config, target, tokenizer, training)
        config = config.replace(mask_token_id=mask)
        shape = drafter_config(config, target, mask_token_id=mask)
    if config.init is not None:
        return _warm_start(config, shape), config
    tokens: Tensor | None = None
    if config.draft_vocab is not None:
        counts = training.token_counts(target.vocab_size)
        tokens = torch.from_numpy(choose_draft_tokens(counts, config.draft_vocab))
    drafter: AnyDrafter
    if isinstance(shape, DrafterConfig):
        drafter = Drafter.fresh(shape, seed=config.seed, draft_tokens=tokens)
    else:
        drafter = MODELS[shape.kind].fresh(shape, seed=config.seed, draft_tokens=tokens)
    match_output_scale(drafter, target, training)
    return drafter, config


def _mask_token(config: TrainConfig, target: Target, tokenizer: Any, training: Corpus) -> int:
    everywhere = training.token_counts(target.vocab_size, learnt=False)
    mask = config.mask_token_id
    if mask is None:
        return choose_mask_token(target, tokenizer, everywhere)
    if 0 <= mask < target.vocab_size and everywhere[mask]:
        raise TrainingError(
            f"mask_token_id is {mask}, which the data hold {everywhere[mask]:,} times; the mask "
            "must be a token that text never holds."
        )
    return mask


def _warm_start(config: TrainConfig, shape: DrafterConfig | BaselineConfig) -> AnyDrafter:
    assert config.init is not None
    drafter, _ = load_any(config.init, dtype=torch.float32)
    stated, wanted = drafter.config.to_dict(), shape.to_dict()
    different = [
        f"{name} {stated[name]!r} against {wanted.get(name)!r}"
        for name in stated
        if name not in _ITS_OWN and stated[name] != wanted.get(name)
    ]
    if different:
        raise TrainingError(
            f"{config.init} is another drafter than these settings describe: "
            f"{'; '.join(different)}. Set them alike, or start from random weights."
        )
    return drafter


@torch.no_grad()
def match_output_scale(drafter: AnyDrafter, target: Target, corpus: Corpus) -> None:
    """Set the final norm to the size of each channel of the target's own final states.

    With a norm of ones the first logits are several times too large: the first steps would be
    spent on shrinking them. A drafter without a norm of its own has the target's scale already.
    """
    norm = drafter.output_norm
    if norm is None:
        return
    sums = torch.zeros(target.hidden_size, dtype=torch.float64)
    count = 0
    for index in range(min(_CONVERSATIONS, len(corpus))):
        tokens = torch.from_numpy(corpus[index].tokens).long().unsqueeze(0)
        hidden = read(target, tokens, taps=(0,)).hidden
        sums += hidden[0].double().square().sum(dim=0).cpu()
        count += tokens.shape[1]
    norm.copy_((sums / max(1, count)).sqrt().to(norm))
