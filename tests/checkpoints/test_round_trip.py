from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from domino_spec.checkpoints import FORMAT_VERSION, Provenance, describe, load_drafter, save_drafter
from domino_spec.checkpoints.layouts import ROPE_TYPES, write_public
from domino_spec.checkpoints.tensors import parameter_shapes, to_public
from domino_spec.drafter import DraftModel, MarkovHeadConfig
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import (
    assert_same_drafter,
    outputs,
    qwen3_8b_config,
    tiny_config,
    tiny_drafter,
    with_parameters_as,
    write_sparse,
)

SLIDING = {
    "layer_types": ("full_attention", "sliding_attention"),
    "sliding_window": 3,
    "causal_window": True,
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="domino"),
        pytest.param({"shift_label": False}, id="domino no-shift"),
        pytest.param({"head": None, "shift_label": False}, id="dflash"),
        pytest.param({"head": None, "shift_label": True}, id="dflash with shift"),
        pytest.param({"draft_tokens": torch.tensor([3, 1, 40, 20, 47])}, id="reduced vocabulary"),
        pytest.param(SLIDING, id="sliding and causal"),
        pytest.param({**SLIDING, "causal_window": False}, id="sliding"),
        pytest.param(YARN, id="yarn"),
    ],
)
def test_what_is_saved_is_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    drafter = tiny_drafter(**changes)
    folder = save_drafter(drafter, tmp_path / "drafter")
    checkpoint = load_drafter(str(folder))
    assert checkpoint.config == drafter.config
    assert checkpoint.layout == "public"
    assert checkpoint.source == str(folder)
    assert checkpoint.ignored_tensors == ()
    assert not checkpoint.drafter.training
    assert all(p.requires_grad for p in checkpoint.drafter.parameters())
    assert_same_drafter(checkpoint.drafter, drafter)


def test_the_outputs_would_show_a_wrong_tensor() -> None:
    ours, theirs = tiny_drafter(seed=0), tiny_drafter(seed=1)
    assert not torch.equal(outputs(ours)[1], outputs(theirs)[1])


def test_loaded_rotary_frequencies_are_real(tmp_path: Path) -> None:
    loaded = load_drafter(save_drafter(tiny_drafter(), tmp_path / "drafter")).drafter
    assert {b.device.type for _, b in loaded.named_buffers()} == {"cpu"}
    assert torch.equal(loaded.backbone.rotary.inv_freq, tiny_drafter().backbone.rotary.inv_freq)


def test_a_loaded_drafter_trains(tmp_path: Path) -> None:
    loaded = load_drafter(save_drafter(tiny_drafter(), tmp_path / "drafter")).drafter
    assert loaded.head is not None
    states = loaded.head.states(torch.ones(1, 2, dtype=int), lambda _: torch.ones(1, 2, 16))
    states.sum().backward()
    assert loaded.head.get_parameter("prefix_gru.weight_ih_l0").grad is not None


def test_shards_and_their_index(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    folder = save_drafter(drafter, tmp_path / "drafter", max_shard_bytes=4000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    description = describe(folder)
    assert index["metadata"]["total_size"] == description.byte_count
    assert description.tensor_count == len(index["weight_map"])
    assert_same_drafter(load_drafter(folder).drafter, drafter)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    folder = save_drafter(drafter, tmp_path / "drafter", max_shard_bytes=1)
    assert len(list(folder.glob("*.safetensors"))) == len(list(drafter.parameters()))
    assert_same_drafter(load_drafter(folder).drafter, drafter)


def test_bf16_is_kept(tmp_path: Path) -> None:
    drafter = with_parameters_as(tiny_drafter(draft_tokens=torch.tensor([5, 2, 9])), torch.bfloat16)
    folder = save_drafter(drafter, tmp_path / "drafter")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert describe(folder).dtypes == ("BF16",)
    loaded = load_drafter(folder).drafter
    assert loaded.dtype == torch.bfloat16
    assert_same_drafter(loaded, drafter)


def test_types_on_saving_and_on_loading(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    folder = save_drafter(drafter, tmp_path / "drafter", dtype=torch.bfloat16)
    assert drafter.dtype == torch.float32
    loaded = load_drafter(folder, dtype=torch.float32).drafter
    for name, parameter in loaded.named_parameters():
        stored = drafter.get_parameter(name).to(torch.bfloat16)
        assert torch.equal(parameter, stored.float())
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        load_drafter(folder, dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        save_drafter(drafter, folder, dtype=torch.int8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": None, "num_layers": 1},
        {"head": MarkovHeadConfig(emb_dim=6)},
        {"head": MarkovHeadConfig(emb_dim=6), "draft_vocab_size": 5},
        {"draft_vocab_size": 5},
    ],
)
def test_shapes_without_building_the_drafter(changes: dict[str, Any]) -> None:
    """Headers are checked against these, so they must be those of the modules."""
    config = tiny_config(**changes)
    built = {to_public(name): tuple(p.shape) for name, p in DraftModel(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())


def test_rope_types_are_those_of_transformers() -> None:
    assert set(ROPE_TYPES) - {"default"} == set(ROPE_INIT_FUNCTIONS) - {"default"}


@pytest.mark.parametrize(("head", "tensors"), [(True, 62), (False, 58)])
def test_real_shapes_of_qwen3_8b(head: bool, tensors: int, tmp_path: Path) -> None:
    config = qwen3_8b_config(head=head)
    shapes = parameter_shapes(config)
    (tmp_path / "config.json").write_text(json.dumps(write_public(config, dtype="bfloat16")))
    write_sparse(tmp_path / "model.safetensors", shapes)
    description = describe(tmp_path)
    assert description.config == config
    assert description.tensor_count == tensors
    assert round(description.backbone_parameters / 1e6, 1) == 1048.6
    assert round(description.head_parameters / 1e6, 1) == (55.9 if head else 0.0)
    parameters = description.backbone_parameters + description.head_parameters
    assert description.byte_count == 2 * parameters
    assert description.dtypes == ("BF16",)

    write_sparse(tmp_path / "model.safetensors", {**shapes, "fc.weight": (4096, 4096)})
    with pytest.raises(CheckpointError, match=r"'fc.weight' is \[4096, 4096\].*\[4096, 20480\]"):
        describe(tmp_path)


def test_the_written_config_is_one_that_others_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 4
    assert config["num_target_layers"] == 8
    assert config["rope_theta"] == 1000.0
    assert config["tie_word_embeddings"] is False
    assert config["dflash_config"] == {
        "mask_token_id": 47,
        "target_layer_ids": [1, 4, 6],
        "projector_type": "domino",
        "emb_dim": 6,
        "gru_hidden_dim": 12,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }
    theirs = AutoConfig.from_pretrained(folder)
    assert theirs.model_type == "qwen3"
    assert theirs.head_dim == 6
    assert theirs.rope_parameters["rope_theta"] == 1000.0


def test_provenance_travels_in_the_config(tmp_path: Path) -> None:
    provenance = Provenance(target_id="org/target", thinking="off", training_length=3072)
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter", provenance=provenance)
    read = load_drafter(folder).provenance
    assert (read.target_id, read.thinking, read.training_length) == ("org/target", "off", 3072)
    assert read.target_revision is None
    assert read.format_version == FORMAT_VERSION
    assert read.created_with is not None
    assert read.created_with.startswith("domino-spec ")
