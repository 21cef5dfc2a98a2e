from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from domino_spec.checkpoints import describe, load_drafter, save_drafter
from domino_spec.drafter import MarkovHeadConfig
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import Raw, assert_same_drafter, raw_public, tiny_drafter

HEAD = MarkovHeadConfig(emb_dim=6)
REDUCED = torch.tensor([3, 1, 40, 20, 47])


@pytest.fixture
def markov(tmp_path: Path) -> Raw:
    """A tiny checkpoint with a Markov head."""
    return raw_public(tiny_drafter(head=HEAD), tmp_path / "made")


@pytest.mark.parametrize("tokens", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_what_is_saved_is_loaded(tokens: torch.Tensor | None, prefix: int, tmp_path: Path) -> None:
    head = MarkovHeadConfig(emb_dim=6, pure_draft_prefix_len=prefix)
    drafter = tiny_drafter(head=head, draft_tokens=tokens)
    folder = save_drafter(drafter, tmp_path / "drafter")
    checkpoint = load_drafter(folder)
    assert checkpoint.config == drafter.config
    assert_same_drafter(checkpoint.drafter, drafter)
    assert describe(folder).head_parameters == 6 * (48 + (48 if tokens is None else 5))


def test_the_written_config(markov: Raw) -> None:
    """Loaders that look at the architecture and those that look at the head both refuse it."""
    assert markov.config["architectures"] == ["MarkovDraftModel"]
    assert markov.section["projector_type"] == "markov"
    assert markov.section["emb_dim"] == 6
    assert markov.section["pure_draft_prefix_len"] == 0
    assert "gru_hidden_dim" not in markov.section
    assert markov.tensors["markov_w1.weight"].shape == (48, 6)
    assert markov.tensors["markov_w2.weight"].shape == (48, 6)


def test_an_unknown_kind_of_head_names_the_known(markov: Raw, tmp_path: Path) -> None:
    markov.config["architectures"] = ["DFlashDraftModel"]
    markov.section["projector_type"] = "later"
    with pytest.raises(ConfigError, match=r"projector_type is 'later'; expected .*'markov'"):
        describe(markov.write(tmp_path / "drafter"))


@pytest.mark.parametrize("name", ["markov_w1.weight", "markov_w2.weight"])
def test_a_missing_tensor(name: str, markov: Raw, tmp_path: Path) -> None:
    del markov.tensors[name]
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor: '{name}' \[48, 6\]"):
        load_drafter(markov.write(tmp_path / "drafter"))


def test_a_mis_shaped_table(markov: Raw, tmp_path: Path) -> None:
    markov.tensors["markov_w1.weight"] = torch.zeros(47, 6)
    with pytest.raises(CheckpointError, match=r"'markov_w1.weight' is \[47, 6\], expected \[48, 6"):
        load_drafter(markov.write(tmp_path / "drafter"))


def test_a_vocabulary_mismatch_is_named_as_one(markov: Raw, tmp_path: Path) -> None:
    markov.tensors["markov_w2.weight"] = torch.zeros(40, 6)
    with pytest.raises(CheckpointError, match=r"vocabulary mismatch: tensor 'markov_w2\.weight'"):
        load_drafter(markov.write(tmp_path / "drafter"))


def test_an_undeclared_head(markov: Raw, tmp_path: Path) -> None:
    markov.config["architectures"] = ["DFlashDraftModel"]
    del markov.section["projector_type"]
    with pytest.raises(CheckpointError, match=r"'markov_w1\.weight'.*declares no Markov head"):
        load_drafter(markov.write(tmp_path / "drafter"))


def test_a_domino_heads_tensors_in_its_place(domino: Raw, tmp_path: Path) -> None:
    domino.section["projector_type"] = "markov"
    del domino.section["gru_hidden_dim"]
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors: 'markov_w1\.weight'"):
        load_drafter(domino.write(tmp_path / "drafter"))


@pytest.mark.parametrize(
    ("architecture", "projector", "words"),
    [
        ("MarkovDraftModel", "domino", "'MarkovDraftModel' but .* 'domino'; set it to 'markov'"),
        ("MarkovDraftModel", None, "'MarkovDraftModel' but .* None"),
        ("DominoDraftModel", "markov", "'DominoDraftModel' but .* 'markov'; set it to 'domino'"),
    ],
)
def test_architecture_and_head_must_agree(
    architecture: str, projector: str | None, words: str, markov: Raw, tmp_path: Path
) -> None:
    markov.config["architectures"] = [architecture]
    markov.section["projector_type"] = projector
    with pytest.raises(ConfigError, match=words):
        describe(markov.write(tmp_path / "drafter"))


def test_a_gru_in_a_markov_head(markov: Raw, tmp_path: Path) -> None:
    markov.section["gru_hidden_dim"] = 12
    with pytest.raises(ConfigError, match=r"gru_hidden_dim is 12 but .*'markov', a head without"):
        describe(markov.write(tmp_path / "drafter"))


def test_it_needs_its_alignment_too(markov: Raw, tmp_path: Path) -> None:
    del markov.section["shift_label"]
    folder = markov.write(tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"has a head but lacks dflash_config\.shift_label"):
        describe(folder)
    assert describe(folder, shift_label=True).config.head == HEAD
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["emb_dim"] == 6
