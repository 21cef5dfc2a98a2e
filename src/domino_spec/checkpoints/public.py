"""The public layout of DFlash and Domino checkpoints: its config.json, read and written."""

from __future__ import annotations

from collections.abc import Mapping
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
from domino_spec.drafter import DrafterConfig, HeadConfig
from domino_spec.drafter.config import SLIDING_ATTENTION
from domino_spec.errors import ConfigError

DFLASH_ARCHITECTURE = "DFlashDraftModel"
DOMINO_ARCHITECTURE = "DominoDraftModel"
ARCHITECTURES = (DFLASH_ARCHITECTURE, DOMINO_ARCHITECTURE)

SECTION = "dflash_config"
_HEAD_PROJECTORS = ("domino", "causal_v5")
_PLAIN_PROJECTORS = (None, "dflash")

_READ = {
    "block_size",
    "causal",
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
        section |= {
            "projector_type": "domino",
            "emb_dim": config.head.emb_dim,
            "gru_hidden_dim": config.head.gru_hidden_dim,
            "pure_draft_prefix_len": config.head.pure_draft_prefix_len,
        }
    values = {
        "architectures": [DFLASH_ARCHITECTURE],
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
    if projector in _PLAIN_PROJECTORS:
        if DOMINO_ARCHITECTURE in (top["architectures"].value or ()):
            raise ConfigError(
                f"architectures is {DOMINO_ARCHITECTURE!r} but {stated.label} is {projector!r}; "
                "set it to 'domino' if the checkpoint has a head, or name the architecture "
                f"{DFLASH_ARCHITECTURE!r} if it has none."
            )
        return None
    if projector not in _HEAD_PROJECTORS:
        raise ConfigError(
            f"{stated.label} is {projector!r}; expected 'domino' (or the older 'causal_v5') for a "
            "Domino head, or 'dflash' or nothing for a drafter without one."
        )
    return HeadConfig(
        gru_hidden_dim=required(section["gru_hidden_dim"], integer),
        emb_dim=required(section["emb_dim"], integer, top["emb_dim"]),
        pure_draft_prefix_len=default(integer(section["pure_draft_prefix_len"]), 0),
    )


def _read_causal(section: Fields, layer_types: tuple[str, ...]) -> bool:
    causal = default(boolean(section["causal"]), False)
    if causal and SLIDING_ATTENTION not in layer_types:
        raise ConfigError(
            f"{section['causal'].label} is true but no layer is {SLIDING_ATTENTION!r}; full layers "
            "see their whole block here. Remove it, or correct layer_types."
        )
    return causal
