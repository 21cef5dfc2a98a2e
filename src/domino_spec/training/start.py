"""The drafter a run starts with: its shape from the target and one dial, its first weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.api.prompts import end_tokens
from domino_spec.checkpoints.read import MODELS, load_drafter
from domino_spec.data import Corpus
from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    DraftModel,
    DraftModule,
    Eagle3Config,
    HeadConfig,
    MarkovHeadConfig,
    MedusaConfig,
    ModuleConfig,
    default_target_layer_ids,
)
from domino_spec.drafter.config import SLIDING_ATTENTION
from domino_spec.errors import ConfigError, TrainingError
from domino_spec.targets import Target, read
from domino_spec.targets.spare_tokens import spare_tokens, special_tokens
from domino_spec.training.config import BASELINES, Size, TrainConfig


@dataclass(frozen=True)
class _Dial:
    layers: int
    captured_layers: int
    rank: int
    gru: int
    medusa_layers: int


_DIALS = {
    "small": _Dial(layers=2, captured_layers=3, rank=64, gru=256, medusa_layers=1),
    "base": _Dial(layers=5, captured_layers=5, rank=256, gru=1024, medusa_layers=4),
    "large": _Dial(layers=8, captured_layers=7, rank=512, gru=2048, medusa_layers=8),
}


@dataclass(frozen=True)
class _Machine:
    """Steps of some seconds at most, in memory that a laptop has, or of a GPU's own."""

    size: Size
    length: int
    step_tokens: int
    chunk_bytes: int


_GPU = _Machine(size="base", length=1024, step_tokens=16384, chunk_bytes=2 * 1024**3)
_CPU = _Machine(size="small", length=512, step_tokens=1024, chunk_bytes=256 * 1024**2)
_BLOCKS_PER_TOKEN = 1 / 8
_LEAST_LOSS_VOCAB = 8192
_DRAFT_STEPS = {"medusa": 5, "eagle3": 7}
_EAGLE3_CAPTURED_LAYERS = 3  # low, middle, high
_MUON_RATE = 3e-3  # steps are a share of the weights' own size: the same for every width
_ADAMW_RATE = 1e-3  # at a hidden size of 576; wider drafters take smaller steps


def derive(
    config: TrainConfig, target: Target, *, alone: bool = True, on_cpu: bool = False
) -> TrainConfig:
    """Fill in what the user left open; `alone` where no other process trains along."""
    machine = _CPU if on_cpu else _GPU
    size = config.size or machine.size
    dial = _DIALS[size]
    text = target.config
    hidden = target.hidden_size
    heads = config.heads or int(text.num_attention_heads)
    kv_heads = config.kv_heads or int(getattr(text, "num_key_value_heads", None) or heads)
    context = target.context_length
    length = config.length or min(machine.length, context or machine.length)
    if context is not None and length > context:
        raise ConfigError(
            f"length is {length}, the target's context {context}; pack sequences of at most that."
        )
    filled: dict[str, Any] = {
        "length": length,
        "size": size,
        "batch_size": config.batch_size or max(1, machine.step_tokens // length),
        "chunk_bytes": config.chunk_bytes or machine.chunk_bytes,
    }
    loss_vocab = config.loss_vocab
    if loss_vocab is None:
        pays = config.draft_vocab is None and target.lm_head_is_plain
        loss_vocab = max(_LEAST_LOSS_VOCAB, target.vocab_size // 4) if pays else 0
    filled["loss_vocab"] = loss_vocab if loss_vocab < target.vocab_size else 0
    filled["optimizer"] = config.optimizer or ("muon" if alone else "adamw")  # needs whole matrices
    rate = _ADAMW_RATE * min(1.0, (576 / hidden) ** 0.5)
    rate = _MUON_RATE if filled["optimizer"] == "muon" else rate
    filled["learning_rate"] = config.learning_rate or rate
    blocks = length * _BLOCKS_PER_TOKEN
    if config.variant in BASELINES:
        filled["draft_steps"] = config.draft_steps or _DRAFT_STEPS[config.variant]
        # As many labels a step as block drafters have: shorter blocks, more of them.
        blocks *= config.block_size / filled["draft_steps"]
    filled["anchors"] = config.anchors or max(1, round(blocks))
    if config.variant == "medusa":
        filled["layers"] = config.layers or dial.medusa_layers
        return config.replace(**filled)
    filled |= {
        "intermediate_size": config.intermediate_size or _intermediate(text, hidden),
        "heads": heads,
        "kv_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": config.head_dim or int(getattr(text, "head_dim", None) or hidden // heads),
    }
    count = _EAGLE3_CAPTURED_LAYERS if config.variant == "eagle3" else dial.captured_layers
    filled["target_layer_ids"] = config.target_layer_ids or _spread_layers(
        target.num_layers, config.captured_layers or count, exact=config.captured_layers is not None
    )
    filled["captured_layers"] = len(filled["target_layer_ids"])
    if config.variant == "eagle3":
        return config.replace(**filled)
    filled["layers"] = config.layers or min(dial.layers, target.num_layers)
    if config.sliding_window is None and config.init is None:
        # Shorter than a sequence: what decoding meets behind it, training has met too.
        filled["sliding_window"] = max(config.block_size, length // 2)
    if config.variant != "dflash":
        filled["rank"] = config.rank or min(dial.rank, hidden)
        filled["prefix_len"] = (
            config.prefix_len if config.prefix_len is not None else int(config.variant == "domino")
        )
    if config.variant == "domino":
        filled["gru_hidden_dim"] = config.gru_hidden_dim or min(dial.gru, 2 * hidden)
    return config.replace(**filled)


def baseline_config(config: TrainConfig, target: Target) -> ModuleConfig:
    """The same for a drafter that is no block drafter."""
    assert config.draft_steps is not None, "derive comes first"
    shared: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": config.draft_vocab,
        "num_target_layers": target.num_layers,
    }
    if config.variant == "medusa":
        assert config.layers is not None
        return MedusaConfig(**shared, num_heads=config.draft_steps, num_layers=config.layers)
    return Eagle3Config(
        **shared,
        **_attention(config, target),
        tapped_layers=config.target_layer_ids or (),
        unrolled=config.draft_steps,
    )


def drafter_config(config: TrainConfig, target: Target, *, mask_token_id: int) -> DrafterConfig:
    """The drafter that a derived configuration describes."""
    assert config.layers is not None, "derive comes first"
    assert config.target_layer_ids is not None
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=config.layers,
        **_attention(config, target),
        **_windows(config.layers, config.sliding_window),
        vocab_size=target.vocab_size,
        draft_vocab_size=config.draft_vocab,
        num_target_layers=target.num_layers,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=mask_token_id,
        block_size=config.block_size,
        shift_label=config.shift_label,
        head=_head(config),
    )


def _windows(layers: int, size: int | None) -> dict[str, Any]:
    """Of that many layers, in a block drafter's names."""
    return {"layer_types": (SLIDING_ATTENTION,) * layers, "sliding_window": size} if size else {}


def _attention(config: TrainConfig, target: Target) -> dict[str, Any]:
    """What a drafter's layers are like, in its configuration's names."""
    text = target.config
    names = {
        "intermediate_size": "intermediate_size",
        "num_heads": "heads",
        "num_kv_heads": "kv_heads",
        "head_dim": "head_dim",
    }
    shape = {name: getattr(config, setting) for name, setting in names.items()}
    assert None not in shape.values(), "derive comes first"
    rope = dict(getattr(text, "rope_parameters", None) or {})
    theta = rope.get("rope_theta", getattr(text, "rope_theta", 10000.0))
    return {
        **shape,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta or 10000.0)},
        "max_position_embeddings": target.context_length or 40960,
    }


def choose_mask_token(target: Target, tokenizer: Any | None, counts: np.ndarray) -> int:
    """A token that neither text nor the target's answers hold: a spare id, else a special one."""
    if tokenizer is not None:
        names = ("bos", "eos", "pad", "unk")
        used = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
        used |= end_tokens(target, tokenizer)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        own = getattr(tokenizer, "mask_token_id", None)
        for token in (
            *spare_tokens(tokenizer, target.vocab_size),
            *([] if own is None else [own]),
            *reversed(special_tokens(tokenizer)),
        ):
            if token >= target.vocab_size or token in used or counts[token]:
                continue
            text = tokenizer.convert_ids_to_tokens(token)
            if text is None or text not in template:
                return int(token)
    raise ConfigError(
        "no unused token can serve as the mask: every id belongs to text. Name one that your "
        "text never holds with mask_token_id."
    )


def choose_draft_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` tokens used most, in the target's order; ties go to the lower id."""
    if size >= len(counts):
        raise ConfigError(
            f"draft_vocab is {size}, the target's vocabulary {len(counts)}; leave it out for all."
        )
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size])


def _head(config: TrainConfig) -> HeadConfig | None:
    if config.variant == "dflash":
        return None
    assert config.rank is not None
    assert config.prefix_len is not None
    if config.variant == "markov":
        return MarkovHeadConfig(emb_dim=config.rank, pure_draft_prefix_len=config.prefix_len)
    assert config.gru_hidden_dim is not None
    return DominoHeadConfig(
        gru_hidden_dim=config.gru_hidden_dim,
        emb_dim=config.rank,
        pure_draft_prefix_len=config.prefix_len,
    )


def _intermediate(text: Any, hidden: int) -> int:
    stated = getattr(text, "intermediate_size", None)
    return int(stated) if isinstance(stated, int) and stated else 4 * hidden


def _spread_layers(num_layers: int, count: int, *, exact: bool) -> tuple[int, ...]:
    """Evenly spread target layers; fewer of a shallow target, unless the count is `exact`."""
    while True:
        try:
            return default_target_layer_ids(num_layers, count)
        except ConfigError:
            if exact or count == 1:
                raise
            count -= 1


_CONVERSATIONS = 16
# What a drafter to start from brings along: no setting holds it, and training does not change it.
_ITS_OWN = {
    "causal_window", "layer_types", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "sliding_window",
}  # fmt: skip


def start_drafter(
    config: TrainConfig,
    target: Target,
    tokenizer: Any,
    training: Corpus,
    *,
    scales: dict[str, Tensor] | None = None,
) -> tuple[DraftModule, TrainConfig, dict[str, Tensor]]:
    """Random weights, or those of `init`; the configuration with its mask; the weights' scales.

    `scales` are those of a run that is resumed, whose weights are read later.
    """
    shape: DrafterConfig | ModuleConfig
    if config.variant in BASELINES:
        shape = baseline_config(config, target)
    else:
        mask = _mask_token(config, target, tokenizer, training)
        config = config.replace(mask_token_id=mask)
        shape = drafter_config(config, target, mask_token_id=mask)
    if config.init is not None:
        drafter = _warm_start(config, shape)
        if isinstance(drafter, DraftModel):
            own = drafter.config.sliding_window or 0
            if config.sliding_window not in (None, own):
                drafter = with_windows(drafter, config.sliding_window)
            if drafter.config.block_size != config.block_size:  # no weight depends on it
                drafter = _altered(drafter, block_size=config.block_size)
            config = config.replace(sliding_window=drafter.config.sliding_window or 0)
    else:
        tokens = _draft_tokens(config, target, training)
        drafter = MODELS[type(shape)].fresh(shape, seed=config.seed, draft_tokens=tokens)
    if scales is None:
        sizes = measure_sizes(drafter, target, training)
        if config.init is None:
            fit_to_sizes(drafter, target, sizes)
        scales = weight_scales(drafter, sizes)
    return drafter, config, scales


def _draft_tokens(config: TrainConfig, target: Target, training: Corpus) -> Tensor | None:
    if config.draft_vocab is None:
        return None
    counts = training.token_counts(target.vocab_size)
    return torch.from_numpy(choose_draft_tokens(counts, config.draft_vocab))


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


def _warm_start(config: TrainConfig, shape: DrafterConfig | ModuleConfig) -> DraftModule:
    assert config.init is not None
    layers = shape.num_target_layers
    drafter: DraftModule = load_drafter(
        config.init, dtype=torch.float32, num_target_layers=layers, any_kind=True
    ).drafter
    stated, wanted = drafter.config.to_dict(), shape.to_dict()
    own = _ITS_OWN | ({"block_size"} if isinstance(drafter, DraftModel) else set())
    different = [
        f"{name} {stated[name]!r} against {wanted.get(name)!r}"
        for name in stated
        if name not in own and stated[name] != wanted.get(name)
    ]
    if different:
        raise TrainingError(
            f"{config.init} is another drafter than these settings describe: "
            f"{'; '.join(different)}. Set them alike, or start from random weights."
        )
    return drafter


def with_windows(drafter: DraftModel, size: int | None) -> DraftModel:
    """The same weights in layers that read so much of their context."""
    windows: dict[str, Any] = {"layer_types": (), "sliding_window": None}
    return _altered(drafter, **windows | _windows(drafter.config.num_layers, size))


def _altered(drafter: DraftModel, **changes: Any) -> DraftModel:
    """The same weights under another configuration that has places for all of them."""
    changed = DraftModel(replace(drafter.config, **changes), drafter.draft_tokens)
    changed.load_state_dict(drafter.state_dict())
    return changed


@dataclass(frozen=True)
class StateSizes:
    """The typical size of each channel of the target's states, as a power of two."""

    captured: Tensor  # [captured layers * hidden]
    embedding: Tensor  # [hidden]
    hidden: Tensor  # [hidden]: final states, after the norm


@torch.no_grad()
def measure_sizes(drafter: DraftModule, target: Target, corpus: Corpus) -> StateSizes:
    """Mean magnitudes over a few conversations: squares would be ruled by a few huge states."""
    widths = (len(drafter.capture_layers), 1, 1)
    sums = [torch.zeros(n * target.hidden_size, dtype=torch.float64) for n in widths]
    count = 0
    for index in range(min(_CONVERSATIONS, len(corpus))):
        tokens = torch.from_numpy(corpus[index].tokens).long().unsqueeze(0)
        reading = read(target, tokens, capture_layers=drafter.capture_layers)
        embedded = target.embed(tokens.to(reading.hidden.device))
        for total, states in zip(sums, (reading.captured, embedded, reading.hidden), strict=True):
            total += states[0].double().abs().sum(dim=0).cpu()
        count += tokens.shape[1]
    sizes = (total.div(max(1, count)).clamp(min=2.0**-20) for total in sums)
    return StateSizes(*(torch.exp2(torch.log2(size).round()).float() for size in sizes))


def weight_scales(drafter: DraftModule, sizes: StateSizes) -> dict[str, Tensor]:
    """By name of a parameter: what its master is larger by (`Masters`)."""
    scales = {}
    for name, states in drafter.reads.items():
        size = _floored(getattr(sizes, states).view(-1, len(sizes.hidden)))
        width = drafter.get_parameter(name).shape[1]
        # A head reads states of its own, of about one, after the target's.
        scales[name] = torch.cat((size, size.new_ones(width - len(size))))
    if drafter.output_norm is not None:
        norm = next(n for n, p in drafter.named_parameters() if p is drafter.output_norm)
        scales[norm] = 1 / sizes.hidden
    return scales


def _floored(size: Tensor) -> Tensor:
    """[layers, hidden], flat: a channel that happened to be silent must not get enormous steps."""
    floor = torch.exp2(torch.log2(size.mean(dim=1, keepdim=True)).round() - _QUIETEST)
    return torch.maximum(size, floor).flatten()


_QUIETEST = 2
"""Powers of two below a layer's mean."""
_FIRST_LOGITS = 0.1
"""Of a block drafter, at most, by the target's own: its guesses are nearly uniform."""


@torch.no_grad()
def fit_to_sizes(drafter: DraftModule, target: Target, sizes: StateSizes) -> None:
    """First weights for a target whose states are of these sizes.

    Where embedding and lm_head are one matrix, a fresh drafter would be certain of the token in
    its slots, the mask, and spend a hundred steps on unlearning it: its logits there are below 1.
    """
    scales = weight_scales(drafter, sizes)
    for name in drafter.reads:
        drafter.get_parameter(name).div_(scales[name])
    if drafter.output_norm is None:
        return
    first = 1.0
    if isinstance(drafter, DraftModel):
        first = _FIRST_LOGITS
        mask = torch.tensor([drafter.config.mask_token_id], device=target.device)
        state = F.rms_norm(target.embed(mask).float(), (target.hidden_size,), eps=1e-6)
        state *= sizes.hidden.to(state.device)
        while target.logits((first * state).to(target.dtype)).abs().max() > 1:
            first /= 2
    drafter.output_norm.copy_(first * sizes.hidden)
