from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from domino_spec.checkpoints import describe, load_drafter
from domino_spec.drafter import DominoHeadConfig
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import Raw, assert_same_drafter, raw_speculators, tiny_drafter

COPIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "t2d",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="domino"),
        pytest.param({"shift_label": False}, id="domino no-shift"),
        pytest.param({"head": None, "shift_label": False}, id="dflash"),
        pytest.param({"draft_tokens": torch.tensor([3, 1, 40, 20])}, id="reduced vocabulary"),
    ],
)
def test_the_same_drafter_in_both_layouts(changes: dict[str, Any], tmp_path: Path) -> None:
    drafter = tiny_drafter(**changes)
    folder = raw_speculators(drafter, tmp_path / "made").write(tmp_path / "drafter")
    checkpoint = load_drafter(folder, num_target_layers=8)
    assert checkpoint.layout == "speculators"
    assert checkpoint.config == drafter.config
    assert checkpoint.ignored_tensors == COPIES
    assert checkpoint.provenance.target_id == "org/target"
    assert checkpoint.provenance.tokenizer_sha256 is None
    assert_same_drafter(checkpoint.drafter, drafter)
    assert describe(folder, num_target_layers=8).ignored_tensors == COPIES


def read(raw: Raw, tmp_path: Path, **overrides: Any) -> Any:
    return describe(raw.write(tmp_path / "drafter"), **{"num_target_layers": 8, **overrides}).config


def test_taps_count_from_one(speculators: Raw, tmp_path: Path) -> None:
    assert speculators.config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert read(speculators, tmp_path).target_layer_ids == (1, 4, 6)
    speculators.config["aux_hidden_state_layer_ids"] = [0, 5, 7]
    with pytest.raises(ConfigError, match=r"aux_hidden_state_layer_ids is \[0, 5, 7\].*from 1"):
        read(speculators, tmp_path)


def test_the_depth_of_the_target(speculators: Raw, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks num_target_layers; pass num_target_layers"):
        read(speculators, tmp_path, num_target_layers=None)
    speculators.config["speculators_config"]["verifier"]["num_hidden_layers"] = 8
    assert read(speculators, tmp_path, num_target_layers=None).num_target_layers == 8
    assert read(speculators, tmp_path, num_target_layers=9).num_target_layers == 8


def test_a_head_on_a_dflash_type(speculators: Raw, tmp_path: Path) -> None:
    speculators.config |= {"speculators_model_type": "dflash", "projector_type": "domino"}
    assert read(speculators, tmp_path).head is not None


def test_other_names_of_the_same_fields(speculators: Raw, tmp_path: Path) -> None:
    config = speculators.config
    config["emb_dim"] = config.pop("logits_correction_emb_dim")
    config["shift_label"] = config.pop("sample_from_anchor")
    assert read(speculators, tmp_path) == tiny_drafter().config
    config |= {"sample_from_anchor": False}
    with pytest.raises(ConfigError, match="sample_from_anchor is False but shift_label is True"):
        read(speculators, tmp_path)
    config |= {"sample_from_anchor": True, "logits_correction_emb_dim": 7}
    with pytest.raises(ConfigError, match="logits_correction_emb_dim is 7 but emb_dim is 6"):
        read(speculators, tmp_path)


def test_a_head_without_alignment_needs_one(speculators: Raw, tmp_path: Path) -> None:
    del speculators.config["sample_from_anchor"]
    with pytest.raises(ConfigError, match=r"lacks sample_from_anchor.*shift_label=True"):
        read(speculators, tmp_path)
    assert read(speculators, tmp_path, shift_label=True).shift_label


def test_defaults_of_that_project(tmp_path: Path) -> None:
    head = DominoHeadConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1)
    raw = raw_speculators(tiny_drafter(head=head), tmp_path / "made")
    for name in ("gru_hidden_dim", "logits_correction_emb_dim", "pure_draft_prefix_len"):
        del raw.config[name]
    assert read(raw, tmp_path).head == head


def test_sliding_layers_are_causal_unless_said(speculators: Raw, tmp_path: Path) -> None:
    assert not read(speculators, tmp_path).causal_window
    speculators.config["transformer_layer_config"] |= {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3,
        "use_sliding_window": True,
    }
    speculators.config["sliding_window_non_causal"] = True
    assert not read(speculators, tmp_path).causal_window
    del speculators.config["sliding_window_non_causal"]
    assert read(speculators, tmp_path).causal_window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
        ({"projector_type": "dspark"}, "projector_type is 'dspark'"),
        ({"projector_type": "dflash"}, "projector_type is 'dflash'"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": None}, r"lacks transformer_layer_config\.hidden_size"),
    ],
)
def test_refusals(changes: dict[str, Any], named: str, speculators: Raw, tmp_path: Path) -> None:
    speculators.config |= changes
    with pytest.raises(ConfigError, match=named):
        read(speculators, tmp_path)


def test_unsupported_layer_fields_are_refused(speculators: Raw, tmp_path: Path) -> None:
    speculators.config["transformer_layer_config"]["attention_bias"] = True
    with pytest.raises(ConfigError, match=r"transformer_layer_config\.attention_bias"):
        read(speculators, tmp_path)


def test_target_copies_are_extra_in_the_public_layout(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["lm_head.weight"] = torch.zeros(48, 16)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' \[48, 16\]"):
        describe(domino.write(tmp_path / "drafter"))
