"""The public layout of DFlash and Domino checkpoints: its config.json, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from domino_spec.checkpoints.fields import (
    Fields,
    boolean,
    default,
    integer,
    integers,
    required,
    text,
)
from domino_spec.checkpoints.overrides import Overrides
from domino_spec.checkpoints.transformer import (
    read_transformer,
    require_own_width,
    write_transformer,
)
from domino_spec.drafter.config import (
    SLIDING_ATTENTION,
    DominoHeadConfig,
    DrafterConfig,
    HeadConfig,
    MarkovHeadConfig,
)
from domino_spec.errors import ConfigError

DFLASH_ARCHITECTURE = "DFlashDraftModel"
DOMINO_ARCHITECTURE = "DominoDraftModel"
MARKOV_ARCHITECTURE = "MarkovDraftModel"
"""Our own: a loader that ignores projector_type must not take the drafter for a plain one."""
ARCHITECTURES = (DFLASH_ARCHITECTURE, DOMINO_ARCHITECTURE, MARKOV_ARCHITECTURE)
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
"""vLLM's name for what its dspark method serves; ours if a head is described beside it."""

SECTION = "dflash_config"
_DOMINO_PROJECTORS = (DominoHeadConfig.kind, "causal_v5")
_MARKOV_PROJECTORS = (MarkovHeadConfig.kind,)
HEAD_PROJECTORS = (*_DOMINO_PROJECTORS, *_MARKOV_PROJECTORS)
_PLAIN_PROJECTORS = (None, "dflash")
_PROJECTORS_OF = {
    DOMINO_ARCHITECTURE: _DOMINO_PROJECTORS,
    MARKOV_ARCHITECTURE: _MARKOV_PROJECTORS,
}

_READ = {
    "block_size",
    "causal",
    "causal_window",
    "emb_dim",
    "gru_hidden_dim",
    "mask_token_id",
    "num_target_layers",
    "projector_type",
    "pure_draft_prefix_len",
    "shift_label",
    "target_hidden_size",
    "target_layer_ids",
}
# The training loss only: how many blocks a sequence gives and how their errors are weighed.
_TRAINING_ONLY = {
    "num_anchors",
    "loss_decay_gamma",
    "lambda_base_start",
    "lambda_base_decay_ratio",
}
# Switches of serving engines, with the setting that is what this package computes anyway.
_NEUTRAL: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "use_aux_hidden_state": True,
    "use_swa": False,
}


def read_public(values: Mapping[str, Any], overrides: Overrides) -> DrafterConfig:
    """The drafter that a public config.json describes."""
    top = Fields(values)
    section = top.nested(SECTION)
    _refuse_unknown(section)
    backbone = read_transformer(top)
    require_own_width(
        backbone["hidden_size"], section["target_hidden_size"], top["target_hidden_size"]
    )
    head = _read_head(top, section)
    stated_shift = boolean(section["shift_label"], top["shift_label"])
    draft_vocab_size = integer(top["draft_vocab_size"])
    return DrafterConfig(
        **backbone,
        causal_window=_read_causal(section, backbone["layer_types"]),
        draft_vocab_size=None if draft_vocab_size == backbone["vocab_size"] else draft_vocab_size,
        num_target_layers=overrides.target_depth(
            integer(top["num_target_layers"], section["num_target_layers"]),
            label="num_target_layers",
        ),
        target_layer_ids=required(section["target_layer_ids"], integers),
        mask_token_id=required(section["mask_token_id"], integer),
        block_size=required(top["block_size"], integer, section["block_size"]),
        shift_label=overrides.alignment(
            stated_shift, label=section["shift_label"].label, has_head=head is not None
        ),
        head=head,
    )


def read_head(values: Mapping[str, Any]) -> tuple[HeadConfig | None, bool]:
    """Only the head and whether labels are shifted: what an engine with its own backbone needs."""
    top = Fields(values)
    section = top.nested(SECTION)
    head = _read_head(top, section)
    stated = boolean(section["shift_label"], top["shift_label"])
    label = section["shift_label"].label
    return head, Overrides().alignment(stated, label=label, has_head=head is not None)


def write_public(config: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter, in the form that public loaders read."""
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if SLIDING_ATTENTION in config.layer_types:
        # Loaders disagree about the default, so it is always spelled out.
        section["causal"] = config.causal_window
    if config.head or config.shift_label:
        section["shift_label"] = config.shift_label
    if config.head:
        section |= {"projector_type": config.head.kind, **asdict(config.head)}
    is_markov = isinstance(config.head, MarkovHeadConfig)
    values = {
        "architectures": [MARKOV_ARCHITECTURE if is_markov else DFLASH_ARCHITECTURE],
        **write_transformer(config),
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        SECTION: section,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    return values


def _refuse_unknown(section: Fields) -> None:
    known = _READ | _TRAINING_ONLY
    unknown = [
        f"{section[name].label} = {value!r}"
        for name, value in section.values.items()
        if name not in known and value is not None and value != _NEUTRAL.get(name, object())
    ]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not supported, and it could change what the drafter computes. "
            f"Known fields are {', '.join(sorted(_READ))}."
        )


def _read_head(top: Fields, section: Fields) -> HeadConfig | None:
    stated = section["projector_type"]
    projector = text(stated)
    known = (*_PLAIN_PROJECTORS, *HEAD_PROJECTORS)
    if projector not in known:
        raise ConfigError(
            f"{stated.label} is {projector!r}; expected 'domino' (or the older 'causal_v5') for a "
            "Domino head, 'markov' for a Markov head, or 'dflash' or nothing for a drafter "
            "without one."
        )
    for architecture in top["architectures"].value or ():
        expected = _PROJECTORS_OF.get(architecture, known)
        if projector not in expected:
            raise ConfigError(
                f"architectures is {architecture!r} but {stated.label} is {projector!r}; set it to "
                f"{expected[0]!r} if the checkpoint has such a head, or name the architecture "
                f"{DFLASH_ARCHITECTURE!r} if it has not."
            )
    if projector in _PLAIN_PROJECTORS:
        return None
    rank = required(section["emb_dim"], integer, top["emb_dim"])
    prefix_len = default(integer(section["pure_draft_prefix_len"]), 0)
    gru_hidden_dim = section["gru_hidden_dim"]
    if projector in _MARKOV_PROJECTORS:
        if gru_hidden_dim.value is not None:
            raise ConfigError(
                f"{gru_hidden_dim.label} is {gru_hidden_dim.value!r} but {stated.label} is "
                f"{projector!r}, a head without a GRU; correct the one that is wrong."
            )
        return MarkovHeadConfig(emb_dim=rank, pure_draft_prefix_len=prefix_len)
    return DominoHeadConfig(
        gru_hidden_dim=required(gru_hidden_dim, integer),
        emb_dim=rank,
        pure_draft_prefix_len=prefix_len,
    )


def _read_causal(section: Fields, layer_types: tuple[str, ...]) -> bool:
    # The second name is ours, for engines whose `causal` would cover full layers too.
    causal = default(boolean(section["causal"], section["causal_window"]), False)
    if causal and SLIDING_ATTENTION not in layer_types:
        raise ConfigError(
            f"{section['causal'].label} is true but no layer is {SLIDING_ATTENTION!r}; full layers "
            "see their whole block here. Remove it, or correct layer_types."
        )
    return causal
