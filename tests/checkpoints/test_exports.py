"""Every form a drafter is exported in: what is written is read back, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from domino_spec.checkpoints import Provenance, describe, export_drafter, load_drafter
from domino_spec.checkpoints.exports import FORMATS
from domino_spec.drafter import DominoHeadConfig, DraftModel, MarkovHeadConfig
from domino_spec.errors import ConfigError, ExportError, InputError

from .helpers import HIDDEN, TinyTarget, assert_same_drafter, tiny_drafter, with_parameters_as

TOKENS = torch.tensor([3, 1, 40, 20, 47])
MARKOV = MarkovHeadConfig(emb_dim=6, pure_draft_prefix_len=0)
FULL, SLIDING = "full_attention", "sliding_attention"
CASES: dict[str, dict[str, Any]] = {
    "domino": {},
    "domino no-shift": {"shift_label": False},
    "p 0": {"head": DominoHeadConfig(gru_hidden_dim=12, emb_dim=6, pure_draft_prefix_len=0)},
    "p 2": {"head": DominoHeadConfig(gru_hidden_dim=12, emb_dim=6, pure_draft_prefix_len=2)},
    "dflash": {"head": None, "shift_label": False},
    "dflash with shift": {"head": None, "shift_label": True},
    "markov": {"head": MARKOV},
    "reduced": {"draft_tokens": TOKENS},
    "reduced dflash": {"draft_tokens": TOKENS, "head": None, "shift_label": False},
    "mixed": {"layer_types": (FULL, SLIDING), "sliding_window": 3},
    "mixed causal": {"layer_types": (FULL, SLIDING), "sliding_window": 3, "causal_window": True},
    "sliding causal": {
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 3,
        "causal_window": True,
    },
    "layers in another order": {"target_layer_ids": (4, 1, 6)},
}
ORDER = {"layers in another order": r"\[4, 1, 6\]; (SGLang|vLLM) joins .* our own engine"}
CANNOT = {
    "sglang": {
        "p 0": "pure_draft_prefix_len is 0; SGLang's rollout expects 1. Train",
        "p 2": "pure_draft_prefix_len is 2; SGLang's rollout expects 1. Train",
        "dflash with shift": "no head and shifted labels.*SGLang reads.*Train it without shift",
        "markov": "a markov head; SGLang serves Domino heads",
        "reduced": "5 of 48 tokens; SGLang serves the target's whole vocabulary.*--to vllm",
        "reduced dflash": "5 of 48 tokens; SGLang serves the target's whole vocabulary",
        **ORDER,
    },
    "speculators": {"markov": "a markov head; the speculators layout.*--to hf"},
    "vllm": {
        "dflash with shift": "no head and shifted labels.*without our plugin.*--to hf",
        **ORDER,
    },
    "vllm-dspark": ORDER
    | dict.fromkeys(
        ("dflash", "dflash with shift", "reduced dflash"), "no head.*dspark.*--to vllm"
    ),
    "hf": {},
}
EXPRESSED = [(to, case) for to in FORMATS for case in CASES if case not in CANNOT[to]]
REFUSED = [(to, case) for to, cases in CANNOT.items() for case in cases]


def made(case: str) -> DraftModel:
    return with_parameters_as(tiny_drafter(**CASES[case]), torch.bfloat16)


def rows_for(drafter: DraftModel, to: str) -> torch.Tensor | None:
    if not FORMATS[to].wants_lm_head(drafter.config):
        return None
    return TinyTarget().out[drafter.draft_tokens]


def export(to: str, case: str, folder: Path, **options: Any) -> tuple[DraftModel, Path]:
    drafter = made(case)
    options = {"lm_head": rows_for(drafter, to), **options}
    return drafter, export_drafter(drafter, folder / "out", to=to, **options)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize(("to", "case"), EXPRESSED)
def test_what_is_exported_is_the_same_drafter(to: str, case: str, tmp_path: Path) -> None:
    drafter, folder = export(to, case, tmp_path)
    checkpoint = load_drafter(folder)
    assert checkpoint.config == drafter.config
    assert checkpoint.layout == ("speculators" if to == "speculators" else "public")
    assert_same_drafter(checkpoint.drafter, drafter)


@pytest.mark.parametrize(("to", "case"), REFUSED)
def test_what_a_form_cannot_express_is_refused(to: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=CANNOT[to][case]):
        export(to, case, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_provenance_travels(to: str, tmp_path: Path) -> None:
    known = Provenance(target_id="org/target", thinking="off", training_length=3072)
    _, folder = export(to, "domino", tmp_path, provenance=known)
    read = describe(folder).provenance
    assert (read.target_id, read.thinking, read.training_length) == ("org/target", "off", 3072)


def test_unknown_forms_and_types(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--to is 'gguf'; expected one of: hf .*sglang .*vllm"):
        export_drafter(tiny_drafter(), tmp_path / "out", to="gguf")
    for to in FORMATS:
        with pytest.raises((ConfigError, ExportError), match="int8"):
            export_drafter(tiny_drafter(), tmp_path / "out", to=to, dtype=torch.int8)


def test_sglang_runs_heads_in_bfloat16_only(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"stored as float32; SGLang runs.*bfloat16"):
        export_drafter(tiny_drafter(), tmp_path / "out", to="sglang")
    plain = tiny_drafter(head=None, shift_label=False)
    assert config_of(export_drafter(plain, tmp_path / "out", to="sglang"))["dtype"] == "float32"


def test_the_fields_that_sglang_reads(tmp_path: Path) -> None:
    config = config_of(export("sglang", "domino", tmp_path)[1])
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "bfloat16"
    assert (config["block_size"], config["num_target_layers"]) == (4, 8)
    assert config["dflash_config"] == {
        "mask_token_id": 47,
        "target_layer_ids": [1, 4, 6],
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 12,
        "emb_dim": 6,
    }
    assert "is_causal" not in config


@pytest.mark.parametrize(("case", "stated"), [("mixed", False), ("mixed causal", None)])
def test_sglang_is_told_of_sliding_layers_that_look_ahead(
    case: str, stated: bool | None, tmp_path: Path
) -> None:
    assert config_of(export("sglang", case, tmp_path)[1]).get("is_causal") is stated


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("domino", "DominoDraftModel"),
        ("dflash", "DFlashDraftModel"),
        ("markov", "MarkovDraftModel"),
    ],
)
def test_the_name_that_vllm_looks_up(case: str, name: str, tmp_path: Path) -> None:
    assert config_of(export("vllm", case, tmp_path)[1])["architectures"] == [name]


@pytest.mark.parametrize(("case", "shift"), [("domino", True), ("domino no-shift", False)])
def test_dspark_is_told_which_slot_gives_the_first_draft(
    case: str, shift: bool, tmp_path: Path
) -> None:
    config = config_of(export("vllm-dspark", case, tmp_path)[1])
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["sample_from_anchor"] is shift
    assert config["dspark_bonus_anchor"] is not shift


@pytest.mark.parametrize(
    ("case", "stated"),
    [
        ("domino", {}),
        ("mixed", {"causal": False}),
        ("sliding causal", {"causal": True}),
        # vLLM's `causal` would make the full layer causal too; silence means sliding ones only.
        ("mixed causal", {"causal_window": True}),
    ],
)
def test_vllm_makes_only_the_right_layers_causal(
    case: str, stated: dict[str, bool], tmp_path: Path
) -> None:
    section = config_of(export("vllm", case, tmp_path)[1])["dflash_config"]
    assert {name: section[name] for name in section if name.startswith("causal")} == stated
    assert (section["mask_token_id"], section["target_layer_ids"]) == (47, [1, 4, 6])


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("case", ["reduced", "reduced dflash"])
def test_a_reduced_vocabulary_brings_its_lm_head_rows(case: str, to: str, tmp_path: Path) -> None:
    _, folder = export(to, case, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    mapped = torch.arange(len(TOKENS)) + tensors["d2t"]
    assert torch.equal(mapped, TOKENS)
    assert torch.equal(tensors["lm_head.weight"], TinyTarget().out[TOKENS].bfloat16())
    config = config_of(folder)
    assert config["draft_vocab_size"] == len(TOKENS)
    assert "lm_head.weight" in describe(folder).ignored_tensors
    if to == "vllm":
        assert config["has_own_lm_head"] is True
    else:
        assert tensors["t2d"].nonzero().flatten().tolist() == sorted(TOKENS.tolist())


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("rows", "named"),
    [(None, r"holds the target's lm_head rows.*--target"), (7, r"\[7, 16\]; expected \[5, 16\]")],
)
def test_lm_head_rows_must_be_there(rows: int | None, named: str, to: str, tmp_path: Path) -> None:
    lm_head = None if rows is None else torch.zeros(rows, HIDDEN)
    with pytest.raises(ExportError, match=named):
        export(to, "reduced", tmp_path, lm_head=lm_head)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_a_whole_vocabulary_repeats_nothing_of_the_target(to: str, tmp_path: Path) -> None:
    _, folder = export(to, "domino", tmp_path)
    assert not {"lm_head.weight", "d2t", "t2d"} & set(load_file(folder / "model.safetensors"))


def test_the_fields_of_a_speculators_config(tmp_path: Path) -> None:
    known = Provenance(target_id="org/target")
    _, folder = export("speculators", "p 2", tmp_path, provenance=known)
    config = config_of(folder)
    layers = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "domino"
    assert config["speculators_config"]["algorithm"] == "domino"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 4)
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert (config["gru_hidden_dim"], config["logits_correction_emb_dim"]) == (12, 6)
    assert (config["pure_draft_prefix_len"], config["sample_from_anchor"]) == (2, True)
    assert (config["mask_token_id"], config["block_size"]) == (47, 4)
    assert config["draft_vocab_size"] == layers["vocab_size"] == 48
    assert config["sliding_window_non_causal"] is True
    assert layers["model_type"] == "qwen3"
    names = set(load_file(folder / "model.safetensors"))
    assert "logits_correction.prefix_gru.weight_ih_l0" in names
    assert "logits_correction.embed_proj.2.weight" in names
    assert "fc.weight" in names


def test_a_plain_speculators_drafter_drafts_one_fewer(tmp_path: Path) -> None:
    config = config_of(export("speculators", "dflash", tmp_path)[1])
    assert config["speculators_model_type"] == "dflash"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["sample_from_anchor"] is False
    assert "gru_hidden_dim" not in config
