from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from domino_spec.checkpoints import describe, load_drafter
from domino_spec.drafter import DrafterConfig
from domino_spec.errors import ConfigError

from .helpers import Raw, assert_same_drafter, raw_public, tiny_drafter


def config_of(raw: Raw, tmp_path: Path, **overrides: Any) -> DrafterConfig:
    return describe(raw.write(tmp_path / "drafter"), **overrides).config


def same_as_saved(raw: Raw, tmp_path: Path, **changes: Any) -> None:
    assert_same_drafter(
        load_drafter(raw.write(tmp_path / "drafter")).drafter, tiny_drafter(**changes)
    )


# Spellings ------------------------------------------------------------------------------------


def test_newer_specforge_naming(domino: Raw, tmp_path: Path) -> None:
    domino.config["architectures"] = ["DominoDraftModel"]
    domino.section["block_size"] = domino.config.pop("block_size")
    domino.section["num_target_layers"] = domino.config.pop("num_target_layers")
    del domino.config["rope_theta"]
    same_as_saved(domino, tmp_path)


def test_first_releases_naming(domino: Raw, tmp_path: Path) -> None:
    domino.section["projector_type"] = "causal_v5"
    domino.config["emb_dim"] = domino.section.pop("emb_dim")
    for name in ("rope_parameters", "layer_types"):
        del domino.config[name]
    for module in ("prefix_gru.", "embed_proj."):
        domino.rename(module, f"logit_head.{module}")
    assert "logit_head.prefix_gru.weight_ih_l0" in domino.tensors
    same_as_saved(domino, tmp_path)


def test_a_uniform_model_prefix(domino: Raw, tmp_path: Path) -> None:
    same_as_saved(domino.rename("", "model."), tmp_path)


def test_old_rope_scaling(domino: Raw, tmp_path: Path) -> None:
    del domino.config["rope_parameters"]
    domino.config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    same_as_saved(
        domino,
        tmp_path,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    )


@pytest.mark.parametrize("projector", [None, "dflash"])
def test_a_plain_projector_means_no_head(
    projector: str | None, dflash: Raw, tmp_path: Path
) -> None:
    dflash.section["projector_type"] = projector
    assert config_of(dflash, tmp_path).head is None


def test_a_missing_prefix_length_is_0(domino: Raw, tmp_path: Path) -> None:
    del domino.section["pure_draft_prefix_len"]
    head = config_of(domino, tmp_path).head
    assert head is not None
    assert head.pure_draft_prefix_len == 0


def test_a_missing_head_dim_is_the_even_share(tmp_path: Path) -> None:
    raw = raw_public(tiny_drafter(head_dim=16 // 4), tmp_path / "made")
    del raw.config["head_dim"]
    same_as_saved(raw, tmp_path, head_dim=4)


def test_a_full_draft_vocabulary_is_none(domino: Raw, tmp_path: Path) -> None:
    domino.config["draft_vocab_size"] = domino.config["vocab_size"]
    assert config_of(domino, tmp_path).draft_vocab_size is None


def test_noise_is_accepted(domino: Raw, tmp_path: Path) -> None:
    domino.config |= {"num_anchors": 256, "bos_token_id": 1, "transformers_version": "4.57.1"}
    domino.section.update({"num_anchors": 256, "use_swa": False, "something_unset": None})
    same_as_saved(domino, tmp_path)


# Alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_a_head_without_shift_label_needs_one(given: bool, domino: Raw, tmp_path: Path) -> None:
    del domino.section["shift_label"]
    folder = domino.write(tmp_path / "drafter")
    for read in (describe, load_drafter):
        with pytest.raises(ConfigError, match=r"dflash_config\.shift_label.*shift_label=True"):
            read(folder)
    assert load_drafter(folder, shift_label=given).drafter.config.shift_label is given
    assert describe(folder, shift_label=given).config.shift_label is given


def test_a_shift_label_that_contradicts_the_config(domino: Raw, tmp_path: Path) -> None:
    folder = domino.write(tmp_path / "drafter")
    assert load_drafter(folder, shift_label=True).config.shift_label
    with pytest.raises(ConfigError, match=r"shift_label is True .* shift_label=False"):
        load_drafter(folder, shift_label=False)


def test_dflash_without_shift_label_is_unshifted(dflash: Raw, tmp_path: Path) -> None:
    assert "shift_label" not in dflash.section
    assert config_of(dflash, tmp_path).shift_label is False


def test_shift_label_must_be_a_truth_value(domino: Raw, tmp_path: Path) -> None:
    domino.section["shift_label"] = "false"
    with pytest.raises(ConfigError, match=r"dflash_config\.shift_label is 'false'; .*true or"):
        config_of(domino, tmp_path)


# The target's depth ---------------------------------------------------------------------------


def test_num_target_layers_from_the_caller(domino: Raw, tmp_path: Path) -> None:
    assert config_of(domino, tmp_path, num_target_layers=9).num_target_layers == 8
    del domino.config["num_target_layers"]
    with pytest.raises(ConfigError, match="lacks num_target_layers; pass num_target_layers"):
        config_of(domino, tmp_path)
    assert config_of(domino, tmp_path, num_target_layers=9).num_target_layers == 9


# Contradictions and gaps ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "section", "named"),
    [
        ({"block_size": 8}, {"block_size": 4}, r"block_size is 8 but dflash_config\.block_size"),
        ({"emb_dim": 7}, {}, r"dflash_config\.emb_dim is 6 but emb_dim is 7"),
        ({"shift_label": False}, {}, r"dflash_config\.shift_label is True but shift_label"),
        ({}, {"num_target_layers": 9}, r"num_target_layers is 8 but dflash_config\.num_target"),
        ({"rope_theta": 5.0}, {}, r"rope_theta is 5\.0 but rope_parameters\.rope_theta is 1000"),
    ],
)
def test_two_places_that_disagree(
    top: dict[str, Any], section: dict[str, Any], named: str, domino: Raw, tmp_path: Path
) -> None:
    domino.config |= top
    domino.section.update(section)
    with pytest.raises(ConfigError, match=named):
        config_of(domino, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "block_size",
    ],
)
def test_a_missing_field_is_named(name: str, domino: Raw, tmp_path: Path) -> None:
    del domino.config[name]
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        config_of(domino, tmp_path)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids", "emb_dim", "gru_hidden_dim"])
def test_a_missing_section_field_is_named(name: str, domino: Raw, tmp_path: Path) -> None:
    del domino.section[name]
    with pytest.raises(ConfigError, match=rf"lacks dflash_config\.{name}"):
        config_of(domino, tmp_path)


def test_missing_rope_theta_is_never_guessed(domino: Raw, tmp_path: Path) -> None:
    del domino.config["rope_theta"], domino.config["rope_parameters"]
    with pytest.raises(ConfigError, match="lacks rope_theta"):
        config_of(domino, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "16"),
        ("hidden_size", True),
        ("rms_norm_eps", "1e-6"),
        ("layer_types", 2),
        ("dflash_config", []),
        ("rope_parameters", 3),
        ("domino_spec", "x"),
    ],
)
def test_a_value_of_the_wrong_type(name: str, value: Any, domino: Raw, tmp_path: Path) -> None:
    domino.config[name] = value
    with pytest.raises(ConfigError, match=rf"{name} is .*; expected"):
        config_of(domino, tmp_path)


def test_true_is_no_token_id(domino: Raw, tmp_path: Path) -> None:
    domino.section["mask_token_id"] = True
    with pytest.raises(
        ConfigError, match=r"dflash_config\.mask_token_id is True; expected a whole"
    ):
        config_of(domino, tmp_path)


# What would change the arithmetic --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
        ("target_hidden_size", 32),
        ("model_type", "llama"),
    ],
)
def test_unsupported_fields_are_refused(name: str, value: Any, domino: Raw, tmp_path: Path) -> None:
    domino.config[name] = value
    with pytest.raises(ConfigError, match=name):
        config_of(domino, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", False),
        ("mlp_bias", False),
        ("target_hidden_size", 16),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
    ],
)
def test_their_neutral_values_are_accepted(
    name: str, value: Any, domino: Raw, tmp_path: Path
) -> None:
    domino.config[name] = value
    config_of(domino, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_swa", True), ("selector_rank", 8), ("target_hidden_size", 32), ("causal", True)],
)
def test_unknown_section_fields_are_refused(
    name: str, value: Any, domino: Raw, tmp_path: Path
) -> None:
    domino.section[name] = value
    with pytest.raises(ConfigError, match=rf"dflash_config\.{name}"):
        config_of(domino, tmp_path)


def test_an_unknown_projector_is_refused(domino: Raw, tmp_path: Path) -> None:
    domino.section["projector_type"] = "dspark"
    with pytest.raises(ConfigError, match=r"dflash_config\.projector_type is 'dspark'"):
        config_of(domino, tmp_path)


def test_a_domino_architecture_without_a_projector(dflash: Raw, tmp_path: Path) -> None:
    dflash.config["architectures"] = ["DominoDraftModel"]
    with pytest.raises(ConfigError, match=r"'DominoDraftModel' but dflash_config\.projector_type"):
        config_of(dflash, tmp_path)


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], ["DFlash2DraftModel"], [], None])
def test_other_architectures_are_refused(
    architectures: list[str] | None, domino: Raw, tmp_path: Path
) -> None:
    domino.config["architectures"] = architectures
    with pytest.raises(ConfigError, match=rf"architectures = \[{str(architectures or '')[1:-1]}"):
        config_of(domino, tmp_path)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "spiral", "rope_theta": 1.0}, "'spiral'"),
        ({"full_attention": {"rope_theta": 1.0}}, r"rope_parameters\.full_attention"),
        ({"rope_theta": 1.0, "partial_rotary_factor": 0.25}, r"partial_rotary_factor is 0\.25"),
    ],
)
def test_unknown_positions_are_refused(
    rope: dict[str, Any], named: str, domino: Raw, tmp_path: Path
) -> None:
    del domino.config["rope_theta"]
    domino.config["rope_parameters"] = rope
    with pytest.raises(ConfigError, match=named):
        config_of(domino, tmp_path)


# Windows --------------------------------------------------------------------------------------

MIXED = ["full_attention", "sliding_attention"]


def test_windows_are_read(domino: Raw, tmp_path: Path) -> None:
    domino.config |= {"layer_types": MIXED, "sliding_window": 3, "use_sliding_window": True}
    config = config_of(domino, tmp_path)
    assert config.layer_types == tuple(MIXED)
    assert (config.sliding_window, config.causal_window) == (3, False)
    domino.section["causal"] = True
    assert config_of(domino, tmp_path).causal_window


def test_windows_by_qwen3s_own_rule(domino: Raw, tmp_path: Path) -> None:
    del domino.config["layer_types"]
    domino.config |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    assert config_of(domino, tmp_path).layer_types == tuple(MIXED)
    domino.config["use_sliding_window"] = False
    config = config_of(domino, tmp_path)
    assert config.layer_types == ("full_attention",) * 2
    assert config.sliding_window is None


def test_windows_switched_off_and_on(domino: Raw, tmp_path: Path) -> None:
    domino.config |= {"layer_types": MIXED, "sliding_window": 3, "use_sliding_window": False}
    with pytest.raises(ConfigError, match="use_sliding_window is false but layer_types"):
        config_of(domino, tmp_path)
