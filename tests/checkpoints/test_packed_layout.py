from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from domino_spec.checkpoints import (
    describe,
    load_drafter,
    save_drafter,
    save_packed,
)
from domino_spec.drafter import DraftModel, MarkovHeadConfig
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import Raw, assert_same_drafter, outputs, tiny_drafter

CASES = {
    "domino": {},
    "markov": {"head": MarkovHeadConfig(emb_dim=6)},
    "dflash": {"head": None, "shift_label": False},
    "reduced": {"draft_tokens": torch.tensor([3, 1, 40, 20, 47])},
}


def packed(folder: Path, drafter: DraftModel | None = None, **options: Any) -> Path:
    return save_packed(drafter or tiny_drafter(), folder, **{"group_size": 10, **options})


def raw_packed(folder: Path, **options: Any) -> Raw:
    packed(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    return Raw(config, load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("case", CASES)
def test_loading_equals_exporting_and_loading(case: str, bits: int, tmp_path: Path) -> None:
    """In every type; the groups of 10 divide none of the tiny drafter's widths."""
    drafter = tiny_drafter(**CASES[case])
    folder = packed(tmp_path / "packed", drafter, bits=bits)
    checkpoint = load_drafter(folder)
    assert checkpoint.config == drafter.config
    assert checkpoint.layout == "packed"
    assert checkpoint.drafter.dtype == torch.bfloat16
    exported = save_drafter(checkpoint.drafter, tmp_path / "exported", dtype=torch.bfloat16)
    assert describe(exported).layout == "public"
    for dtype in (None, torch.bfloat16, torch.float32, torch.float16):
        direct = load_drafter(folder, dtype=dtype).drafter
        assert_same_drafter(direct, load_drafter(exported, dtype=dtype).drafter)
        assert direct.dtype == (dtype or torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_outputs_come_near_those_of_the_original(case: str, tmp_path: Path) -> None:
    drafter = tiny_drafter(**CASES[case])
    expected = outputs(drafter)[1]
    errors = []
    for bits in (8, 6, 4):
        folder = packed(tmp_path / str(bits), drafter, bits=bits)
        found = outputs(load_drafter(folder, dtype=torch.float32).drafter)[1]
        errors.append(float((found - expected).norm() / expected.norm()))
    assert errors[0] < 0.03
    assert errors[0] < errors[1] < errors[2] < 0.5


def test_the_size_is_that_of_the_bits(tmp_path: Path) -> None:
    sizes = {
        bits: describe(packed(tmp_path / str(bits), bits=bits, group_size=64)) for bits in (8, 6, 4)
    }
    drafter = tiny_drafter()
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    norms = sum(p.numel() for p in drafter.parameters() if p.dim() == 1)
    scales = sum(p.shape[0] for p in matrices)  # every row is one short group
    codes = sum(p.numel() for p in matrices)
    assert sizes[8].byte_count == codes + 2 * scales + 2 * norms
    assert sizes[4].byte_count < sizes[6].byte_count < sizes[8].byte_count
    assert sizes[6].dtypes == ("6-bit", "BF16")
    assert sizes[8].packing is not None
    assert sizes[8].packing.bits["fc.weight"] == 8
    assert "norm.weight" not in sizes[8].packing.bits
    plain = describe(save_drafter(drafter, tmp_path / "plain"))
    assert sizes[4].backbone_parameters == plain.backbone_parameters
    assert sizes[4].head_parameters == plain.head_parameters
    assert sizes[4].tensor_count == plain.tensor_count
    assert plain.packing is None


def test_bits_by_pattern(tmp_path: Path) -> None:
    choice = {"embed_proj.2.weight": 4, "layers.0.*": 8, "layers.*": 6}
    folder = packed(tmp_path / "drafter", bits=choice)
    found = describe(folder).packing
    assert found is not None
    assert found.bits["embed_proj.2.weight"] == 4
    assert found.bits["layers.0.mlp.up_proj.weight"] == 8
    assert found.bits["layers.1.mlp.up_proj.weight"] == 6
    assert "layers.1.self_attn.q_norm.weight" not in found.bits
    assert "fc.weight" not in found.bits
    loaded = load_drafter(folder).drafter
    assert torch.equal(loaded.backbone.fc.weight, tiny_drafter().backbone.fc.weight.bfloat16())


def test_wrong_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no matrix is called 'layer\.\*'; the drafter has fc"):
        packed(tmp_path / "drafter", bits={"layer.*": 8})
    with pytest.raises(ConfigError, match=r"bits of fc\.weight is 5; expected one of 8, 6, 4"):
        packed(tmp_path / "drafter", bits=5)
    with pytest.raises(ConfigError, match="group_size is 0"):
        packed(tmp_path / "drafter", group_size=0)
    assert list(tmp_path.iterdir()) == []


def test_other_loaders_refuse_it(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = packed(tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DominoPackedDraftModel"]
    assert "fc.weight" not in load_file(folder / "model.safetensors")
    with pytest.raises(ValueError, match="domino_packed"):
        AutoConfig.from_pretrained(folder)


# Damage ---------------------------------------------------------------------------------------


def refused(raw: Raw, tmp_path: Path, error: type[Exception], match: str) -> None:
    folder = raw.write(tmp_path / "bent")
    for read in (describe, load_drafter):
        with pytest.raises(error, match=match):
            read(folder)


@pytest.mark.parametrize(
    ("tensor", "value", "named"),
    [
        ("fc.weight.codes", None, r"'fc\.weight\.codes' is missing, expected \[16, "),
        ("fc.weight.scales", None, r"'fc\.weight\.scales' is missing, expected \[16, "),
        ("fc.weight.codes", torch.zeros(16, 47, dtype=torch.int8),
         r"'fc\.weight\.codes' is \[16, 47\] of I8, expected \[16, 48"),
        ("fc.weight.scales", torch.zeros(16, 5), r"scales' is .* of F32, expected .* of F16"),
        ("fc.weight", torch.zeros(16, 48).bfloat16(), r"'fc\.weight' is there packed and plain"),
        ("norm.weight", torch.zeros(16), r"'norm\.weight' is F32, expected BF16"),
        ("norm.weight", None, r"lacks 1 tensor: 'norm\.weight' \[16\]"),
    ],
)  # fmt: skip
def test_damaged_tensors(tensor: str, value: Any, named: str, tmp_path: Path) -> None:
    raw = raw_packed(tmp_path / "made")
    raw.tensors[tensor] = value
    raw.tensors = {name: tensor for name, tensor in raw.tensors.items() if tensor is not None}
    refused(raw, tmp_path, CheckpointError, named)


@pytest.mark.parametrize(
    ("name", "bits", "named"),
    [
        ("fc.weight", 4, r"'fc\.weight\.codes' is \[16, 36\] of U8, .*\[16, 24\]"),
        ("fc.weight", None, r"'fc\.weight\.codes' is U8, expected BF16"),
        ("layers.7.mlp.up_proj.weight", 6, r"names 1 tensor: layers\.7.*no matrix of the drafter"),
    ],
)
def test_bits_of_another_drafter(name: str, bits: Any, named: str, tmp_path: Path) -> None:
    raw = raw_packed(tmp_path / "made", bits=6)
    stated = raw.config["domino_packed"]["bits"]
    stated[name] = bits
    if bits is None:
        del stated[name]
    refused(raw, tmp_path, CheckpointError, named)


def test_broken_scales(tmp_path: Path) -> None:
    raw = raw_packed(tmp_path / "made")
    raw.tensors["fc.weight.scales"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"'fc\.weight\.scales' holds scales that are not"):
        load_drafter(raw.write(tmp_path / "bent"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, r"domino_packed\.version is 2, this release reads 1; upgrade"),
        ({"version": None}, r"lacks domino_packed\.version"),
        ({"dtype": "float32"}, r"domino_packed\.dtype is 'float32'; expected 'bfloat16'"),
        ({"group_size": "64"}, r"domino_packed\.group_size is '64'; expected a whole number"),
        ({"group_size": 0}, r"group_size is 0"),
        ({"bits": {"fc.weight": 5}}, r"bits of fc\.weight is 5"),
        ({"bits": {"fc.weight": "8"}}, r"domino_packed\.bits\.fc\.weight is '8'"),
        ({"bits": [8]}, r"domino_packed\.bits is \[8\]; expected a JSON object"),
    ],
)
def test_a_broken_section(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    raw = raw_packed(tmp_path / "made")
    raw.config["domino_packed"].update(changes)
    refused(raw, tmp_path, ConfigError, words)
