from __future__ import annotations

from pathlib import Path

import pytest
import torch

from domino_spec.checkpoints import describe, load_drafter
from domino_spec.errors import CheckpointError

from .helpers import Raw, assert_same_drafter, raw_public, tiny_drafter


def refused(raw: Raw, tmp_path: Path, match: str) -> None:
    """Both ways of reading refuse it, with the same words."""
    folder = raw.write(tmp_path / "drafter")
    for read in (describe, load_drafter):
        with pytest.raises(CheckpointError, match=match):
            read(folder)


def test_a_missing_tensor(domino: Raw, tmp_path: Path) -> None:
    del domino.tensors["layers.1.mlp.up_proj.weight"]
    refused(domino, tmp_path, r"lacks 1 tensor: 'layers\.1\.mlp\.up_proj\.weight' \[24, 16\]")


def test_many_missing_tensors_are_counted(domino: Raw, tmp_path: Path) -> None:
    for name in [name for name in domino.tensors if name.startswith("layers.1.")]:
        del domino.tensors[name]
    refused(domino, tmp_path, r"lacks 11 tensors: 'layers\.1\..* and 6 more")


def test_an_extra_tensor(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
    refused(domino, tmp_path, r"holds 1 tensor: 'layers\.2\.mlp\.up_proj\.weight' \[24, 16\]")


def test_an_undeclared_head(domino: Raw, tmp_path: Path) -> None:
    del domino.section["projector_type"]
    refused(domino, tmp_path, r"'embed_proj\.0\.weight'.*declares no Domino head")


def test_a_declared_head_that_is_missing(dflash: Raw, tmp_path: Path) -> None:
    head = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 12, "shift_label": True}
    dflash.section.update(head)
    refused(dflash, tmp_path, r"lacks 4 tensors: 'prefix_gru\.weight_ih_l0' \[36, 16\]")


def test_a_bias(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["prefix_gru.bias_ih_l0"] = torch.zeros(36)
    refused(domino, tmp_path, r"'prefix_gru\.bias_ih_l0' \[36\]")


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "prefix_gru.weight_hh_l0"])
def test_a_mis_shaped_tensor(name: str, domino: Raw, tmp_path: Path) -> None:
    right = list(domino.tensors[name].shape)
    domino.tensors[name] = torch.zeros(3, 5)
    shape = str(right).replace("[", r"\[").replace("]", r"\]")
    refused(domino, tmp_path, rf"'{name}' is \[3, 5\], expected {shape}")


def test_a_vocabulary_mismatch_is_named_as_one(domino: Raw, tmp_path: Path) -> None:
    domino.config["vocab_size"] = 64
    refused(
        domino,
        tmp_path,
        r"vocabulary mismatch: tensor 'embed_proj\.2\.weight' is \[48, 6\].*48 tokens.*says 64",
    )


def test_the_same_tensor_under_two_names(domino: Raw, tmp_path: Path) -> None:
    name = "embed_proj.0.weight"
    domino.tensors[f"logit_head.{name}"] = domino.tensors[name].clone()
    refused(domino, tmp_path, rf"'{name}'.*both '{name}'")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors(dtype: torch.dtype, domino: Raw, tmp_path: Path) -> None:
    domino.tensors["fc.weight"] = domino.tensors["fc.weight"].to(dtype)
    refused(domino, tmp_path, r"'fc\.weight' is (I8|F8).*expected one of .*BF16")


def test_mixed_types_become_that_of_fc(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["norm.weight"] = domino.tensors["norm.weight"].double()
    folder = domino.write(tmp_path / "drafter")
    assert describe(folder).dtypes == ("F32", "F64")
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter())


# Reduced vocabularies -------------------------------------------------------------------------

TOKENS = torch.tensor([3, 1, 40, 20])


@pytest.fixture
def reduced(tmp_path: Path) -> Raw:
    return raw_public(tiny_drafter(draft_tokens=TOKENS), tmp_path / "made")


def test_the_map_is_stored_as_offsets(reduced: Raw, tmp_path: Path) -> None:
    assert reduced.config["draft_vocab_size"] == 4
    assert reduced.config["vocab_size"] == 48
    assert reduced.tensors["d2t"].tolist() == [3, 0, 38, 17]
    reduced.tensors["d2t"] = reduced.tensors["d2t"].int()
    folder = reduced.write(tmp_path / "drafter")
    loaded = load_drafter(folder).drafter
    assert loaded.draft_tokens is not None
    assert loaded.draft_tokens.dtype == torch.long
    assert_same_drafter(loaded, tiny_drafter(draft_tokens=TOKENS))
    assert describe(folder).tensor_count == len(reduced.tensors)


def test_a_missing_map(reduced: Raw, tmp_path: Path) -> None:
    del reduced.tensors["d2t"]
    refused(reduced, tmp_path, r"draft_vocab_size = 4 of 48 tokens.*lacks tensor 'd2t' \[4\]")


def test_a_map_of_the_wrong_length(reduced: Raw, tmp_path: Path) -> None:
    reduced.tensors["d2t"] = torch.zeros(5, dtype=torch.long)
    refused(reduced, tmp_path, r"'d2t' is \[5\] of I64, expected \[4\]")


def test_a_map_of_fractions(reduced: Raw, tmp_path: Path) -> None:
    reduced.tensors["d2t"] = torch.zeros(4)
    refused(reduced, tmp_path, r"'d2t' is \[4\] of F32, expected \[4\] whole")


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        ([3, 0, 46, 17], r"d2t\[2\] maps to target id 48"),
        ([-1, 0, 38, 17], r"d2t\[0\] maps to target id -1"),
        ([3, 2, 38, 17], r"d2t maps 2 draft tokens to target id 3"),
    ],
)
def test_a_map_of_wrong_ids(offsets: list[int], named: str, reduced: Raw, tmp_path: Path) -> None:
    reduced.tensors["d2t"] = torch.tensor(offsets)
    with pytest.raises(CheckpointError, match=named):
        load_drafter(reduced.write(tmp_path / "drafter"))


def test_a_map_of_the_whole_vocabulary(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["d2t"] = torch.zeros(48, dtype=torch.long)
    loaded = load_drafter(domino.write(tmp_path / "drafter")).drafter
    assert loaded.draft_tokens is None
    assert_same_drafter(loaded, tiny_drafter())
    domino.tensors["d2t"][:2] = torch.tensor([1, -1])
    with pytest.raises(CheckpointError, match="d2t reorders the vocabulary"):
        load_drafter(domino.write(tmp_path / "drafter"))
