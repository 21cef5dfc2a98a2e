"""The speculators layout of DFlash and Domino checkpoints: its config.json, read."""

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
from domino_spec.checkpoints.transformer import read_transformer, require_own_width
from domino_spec.drafter.config import (
    SLIDING_ATTENTION,
    DominoHeadConfig,
    DrafterConfig,
    HeadConfig,
)
from domino_spec.errors import ConfigError

TYPE_FIELD = "speculators_model_type"
_MODEL_TYPES = ("dflash", "domino")

# What that project takes where a Domino config leaves the field out.
_DEFAULT_GRU_HIDDEN_DIM = 1024
_DEFAULT_EMB_DIM = 256
_DEFAULT_PURE_DRAFT_PREFIX_LEN = 1


def read_speculators(values: Mapping[str, Any], overrides: Overrides) -> DrafterConfig:
    """The drafter that a speculators config.json describes."""
    top = Fields(values)
    backbone = read_transformer(top.nested("transformer_layer_config"))
    require_own_width(backbone["hidden_size"], top["target_hidden_size"])
    head = _read_head(top)
    draft_vocab_size = integer(top["draft_vocab_size"])
    sliding = SLIDING_ATTENTION in backbone["layer_types"]
    return DrafterConfig(
        **backbone,
        causal_window=sliding and not boolean(top["sliding_window_non_causal"]),
        draft_vocab_size=None if draft_vocab_size == backbone["vocab_size"] else draft_vocab_size,
        num_target_layers=overrides.target_depth(
            integer(top["num_target_layers"], _verifier(top)["num_hidden_layers"]),
            label="num_target_layers",
        ),
        target_layer_ids=_read_taps(top),
        mask_token_id=required(top["mask_token_id"], integer),
        block_size=required(top["block_size"], integer),
        shift_label=overrides.alignment(
            boolean(top["sample_from_anchor"], top["shift_label"]),
            label="sample_from_anchor",
            has_head=head is not None,
        ),
        head=head,
    )


def verifier_id(values: Mapping[str, Any]) -> str | None:
    """The target that a speculators config names."""
    return text(_verifier(Fields(values))["name_or_path"])


def _verifier(top: Fields) -> Fields:
    return top.nested("speculators_config").nested("verifier")


def _read_head(top: Fields) -> HeadConfig | None:
    model_type, projector = top[TYPE_FIELD].value, text(top["projector_type"])
    if model_type not in _MODEL_TYPES:
        raise ConfigError(
            f"{TYPE_FIELD} is {model_type!r}; only {' and '.join(map(repr, _MODEL_TYPES))} "
            "checkpoints can be loaded."
        )
    if projector not in (None, *_MODEL_TYPES) or (model_type, projector) == ("domino", "dflash"):
        raise ConfigError(
            f"projector_type is {projector!r} where {TYPE_FIELD} is {model_type!r}; expected "
            "'domino' for a head, or nothing."
        )
    if "domino" not in (model_type, projector):
        return None
    return DominoHeadConfig(
        gru_hidden_dim=default(integer(top["gru_hidden_dim"]), _DEFAULT_GRU_HIDDEN_DIM),
        emb_dim=default(
            integer(top["logits_correction_emb_dim"], top["emb_dim"]), _DEFAULT_EMB_DIM
        ),
        pure_draft_prefix_len=default(
            integer(top["pure_draft_prefix_len"]), _DEFAULT_PURE_DRAFT_PREFIX_LEN
        ),
    )


def _read_taps(top: Fields) -> tuple[int, ...]:
    stated = top["aux_hidden_state_layer_ids"]
    ids = required(stated, integers)
    if min(ids, default=1) < 1:
        raise ConfigError(
            f"{stated.label} is {list(ids)}; they count from 1 (k is the output of layer k-1), and "
            "the embedding output, 0, is not a layer that can be tapped."
        )
    return tuple(i - 1 for i in ids)
