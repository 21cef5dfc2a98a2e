"""Every layout that is read: all spellings give the same drafter, everything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from domino_spec.checkpoints import describe, load_drafter, save_drafter
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, MarkovHeadConfig
from domino_spec.errors import DominoError

from .helpers import HEAD, Raw, assert_same_drafter, raw_public, raw_speculators, tiny_drafter

MARKOV = MarkovHeadConfig(emb_dim=6)
TOKENS = torch.tensor([3, 1, 40, 20])
DFLASH = {"head": None, "shift_label": False}
MIXED = ["full_attention", "sliding_attention"]
WINDOW = {"layer_types": MIXED, "sliding_window": 3, "use_sliding_window": True}
KINDS: dict[str, dict[str, Any]] = {
    "domino": {},
    "no-shift": {"shift_label": False},
    "dflash": DFLASH,
    "markov": {"head": MARKOV},
    "markov after 2": {"head": MarkovHeadConfig(emb_dim=6, pure_draft_prefix_len=2)},
    "markov reduced": {"head": MARKOV, "draft_tokens": TOKENS},
    "reduced": {"draft_tokens": TOKENS},
    "even heads": {"head_dim": 4},
    "project's default head": {
        "head": DominoHeadConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1)
    },
}
COPIES = ("embed_tokens.weight", "lm_head.weight", "t2d", "verifier_lm_head.weight",
          "verifier_norm.weight")  # fmt: skip


def bent(folder: Path, kind: str, layout: str = "public", **changes: Any) -> Path:
    """A checkpoint with other values; None takes a field or a tensor out."""
    make = raw_speculators if layout == "speculators" else raw_public
    raw = make(tiny_drafter(**KINDS[kind]), folder / "made")
    bend(raw.config, changes.get("config", {}))
    if "dflash_config" in raw.config and isinstance(raw.config["dflash_config"], dict):
        bend(raw.section, changes.get("section", {}))
    if layout == "speculators":
        bend(raw.config["transformer_layer_config"], changes.get("layer", {}))
        bend(raw.config["speculators_config"]["verifier"], changes.get("verifier", {}))
    bend(raw.tensors, changes.get("tensors", {}))
    for old, new in changes.get("rename", {}).items():
        raw.rename(old, new)
    return raw.write(folder / "drafter")


def bend(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value


# The same drafter -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "even heads"])
@pytest.mark.parametrize("layout", ["public", "speculators"])
def test_the_same_drafter_in_both_layouts(kind: str, layout: str, tmp_path: Path) -> None:
    drafter = tiny_drafter(**KINDS[kind])
    if layout == "speculators":
        if isinstance(drafter.config.head, MarkovHeadConfig):
            pytest.skip("that layout has no such head")
        folder = raw_speculators(drafter, tmp_path / "made").write(tmp_path / "drafter")
    else:
        folder = save_drafter(drafter, tmp_path / "drafter")
    checkpoint = load_drafter(folder, num_target_layers=8)
    assert checkpoint.layout == layout
    assert checkpoint.config == drafter.config
    assert_same_drafter(checkpoint.drafter, drafter)
    described = describe(folder, num_target_layers=8)
    assert described.config == drafter.config
    ignored = COPIES if layout == "speculators" else ()
    assert checkpoint.ignored_tensors == described.ignored_tensors == ignored
    if layout == "speculators":
        assert checkpoint.provenance.target_id == "org/target"
    head = [p for name, p in drafter.named_parameters() if name.startswith("head.")]
    assert described.head_parameters == sum(p.numel() for p in head)


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "newer SpecForge": (
        "domino",
        {
            "config": {
                "architectures": ["DominoDraftModel"], "block_size": None,
                "num_target_layers": None, "rope_theta": None,
            },
            "section": {"block_size": 4, "num_target_layers": 8},
        },
    ),
    "first releases": (
        "domino",
        {
            "config": {"emb_dim": 6, "rope_parameters": None, "layer_types": None},
            "section": {"projector_type": "causal_v5", "emb_dim": None},
            "rename": {"prefix_gru.": "logit_head.prefix_gru.",
                       "embed_proj.": "logit_head.embed_proj."},
        },
    ),
    "a model prefix": ("domino", {"rename": {"": "model."}}),
    "noise": (
        "domino",
        {
            "config": {"num_anchors": 256, "bos_token_id": 1, "transformers_version": "4.57.1"},
            "section": {"num_anchors": 256, "use_swa": False},
        },
    ),
    "neutral values": (
        "domino",
        {"config": {"attention_bias": False, "mlp_bias": False, "target_hidden_size": 16,
                    "partial_rotary_factor": 1.0}},
    ),
    "head_dim left out": ("even heads", {"config": {"head_dim": None}}),
    "a whole draft vocabulary": ("domino", {"config": {"draft_vocab_size": 48}}),
    "a map of the whole vocabulary": (
        "domino", {"tensors": {"d2t": torch.zeros(48, dtype=torch.long)}}
    ),
    "another projector's name": ("dflash", {"section": {"projector_type": "dflash"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_the_public_layout(name: str, tmp_path: Path) -> None:
    kind, changes = SPELLINGS[name]
    folder = bent(tmp_path, kind, **changes)
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter(**KINDS[kind]))


def config_of(folder: Path, **overrides: Any) -> DrafterConfig:
    return describe(folder, **{"num_target_layers": 8, **overrides}).config


def test_mixed_types_become_that_of_fc(domino: Raw, tmp_path: Path) -> None:
    domino.tensors["norm.weight"] = domino.tensors["norm.weight"].double()
    folder = domino.write(tmp_path / "drafter")
    assert describe(folder).dtypes == ("F32", "F64")
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter())


def test_the_map_of_a_reduced_vocabulary_is_stored_as_offsets(tmp_path: Path) -> None:
    raw = raw_public(tiny_drafter(draft_tokens=TOKENS), tmp_path / "made")
    assert (raw.config["draft_vocab_size"], raw.config["vocab_size"]) == (4, 48)
    assert raw.tensors["d2t"].tolist() == [3, 0, 38, 17]
    raw.tensors["d2t"] = raw.tensors["d2t"].int()
    folder = raw.write(tmp_path / "drafter")
    loaded = load_drafter(folder).drafter
    assert loaded.draft_tokens is not None
    assert loaded.draft_tokens.dtype == torch.long
    assert_same_drafter(loaded, tiny_drafter(draft_tokens=TOKENS))
    assert describe(folder).tensor_count == len(raw.tensors)


@pytest.mark.parametrize(
    ("layout", "kind", "changes", "expected"),
    [
        ("public", "dflash", {}, {"shift_label": False, "head": None}),
        ("public", "domino", {"section": {"pure_draft_prefix_len": None}},
         {"head": DominoHeadConfig(gru_hidden_dim=12, emb_dim=6, pure_draft_prefix_len=0)}),
        ("public", "domino", {"config": {"rope_parameters": None,
                                         "rope_scaling": {"type": "linear", "factor": 2.0}}},
         {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
        ("public", "domino", {"config": WINDOW},
         {"layer_types": tuple(MIXED), "sliding_window": 3, "causal_window": False}),
        ("public", "domino", {"config": WINDOW, "section": {"causal": True}},
         {"causal_window": True}),
        # Qwen3's own rule where the layers are not spelled out.
        ("public", "domino",
         {"config": {**WINDOW, "layer_types": None, "max_window_layers": 1}},
         {"layer_types": tuple(MIXED)}),
        ("public", "domino",
         {"config": {**WINDOW, "layer_types": None, "max_window_layers": 1,
                     "use_sliding_window": False}},
         {"layer_types": ("full_attention",) * 2, "sliding_window": None}),
        ("speculators", "domino", {}, {"target_layer_ids": (1, 4, 6), "causal_window": False}),
        ("speculators", "domino",
         {"config": {"speculators_model_type": "dflash", "projector_type": "domino"}},
         {"head": HEAD}),
        ("speculators", "domino",
         {"config": {"emb_dim": 6, "logits_correction_emb_dim": None, "shift_label": True,
                     "sample_from_anchor": None}},
         {"head": HEAD, "shift_label": True}),
        ("speculators", "project's default head",
         {"config": {"gru_hidden_dim": None, "logits_correction_emb_dim": None,
                     "pure_draft_prefix_len": None}},
         KINDS["project's default head"]),
        ("speculators", "domino", {"layer": WINDOW}, {"causal_window": False}),
        ("speculators", "domino",
         {"layer": WINDOW, "config": {"sliding_window_non_causal": None}}, {"causal_window": True}),
    ],
)  # fmt: skip
def test_what_a_config_says(
    layout: str, kind: str, changes: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    found = config_of(bent(tmp_path, kind, layout, **changes))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "layout", "field"),
    [
        ("domino", "public", "dflash_config.shift_label"),
        ("markov", "public", "dflash_config.shift_label"),
        ("domino", "speculators", "sample_from_anchor"),
    ],
)
def test_a_head_needs_its_alignment(kind: str, layout: str, field: str, tmp_path: Path) -> None:
    silent = {"section": {"shift_label": None}, "config": {"sample_from_anchor": None}}
    folder = bent(tmp_path, kind, layout, **silent)
    for read in (describe, load_drafter):
        with pytest.raises(DominoError, match=f"lacks {field}.*shift_label=True"):
            read(folder, num_target_layers=8)
        for given in (True, False):
            assert read(folder, shift_label=given, num_target_layers=8).config.shift_label is given


def test_an_alignment_that_contradicts_the_config(tmp_path: Path) -> None:
    folder = bent(tmp_path, "domino")
    assert load_drafter(folder, shift_label=True).config.shift_label
    with pytest.raises(DominoError, match=r"shift_label is True .* shift_label=False"):
        load_drafter(folder, shift_label=False)


def test_the_depth_of_the_target(tmp_path: Path) -> None:
    stated = bent(tmp_path, "domino")
    assert config_of(stated, num_target_layers=9).num_target_layers == 8
    for layout in ("public", "speculators"):
        silent = bent(tmp_path / layout, "domino", layout, config={"num_target_layers": None})
        with pytest.raises(DominoError, match="lacks num_target_layers; pass num_target_layers"):
            config_of(silent, num_target_layers=None)
        assert config_of(silent, num_target_layers=9).num_target_layers == 9
    verifier = {"verifier": {"num_hidden_layers": 8}}
    named = bent(tmp_path / "named", "domino", "speculators", **verifier)
    assert config_of(named, num_target_layers=9).num_target_layers == 8


# Refusals -------------------------------------------------------------------------------------

Case = tuple[str, dict[str, Any], str]
DISAGREEING: list[Case] = [
    ("domino", {"config": {"block_size": 8}, "section": {"block_size": 4}},
     r"block_size is 8 but dflash_config\.block_size"),
    ("domino", {"config": {"emb_dim": 7}}, r"dflash_config\.emb_dim is 6 but emb_dim is 7"),
    ("domino", {"config": {"shift_label": False}}, r"dflash_config\.shift_label is True but shift"),
    ("domino", {"section": {"num_target_layers": 9}}, "num_target_layers is 8 but dflash_config"),
    ("domino", {"config": {"rope_theta": 5.0}},
     r"rope_theta is 5\.0 but rope_parameters\.rope_theta is 1000"),
    ("domino", {"config": {**WINDOW, "use_sliding_window": False}},
     "use_sliding_window is false but layer_types"),
    ("dflash", {"config": {"architectures": ["DominoDraftModel"]}},
     r"'DominoDraftModel' but dflash_config\.projector_type"),
    ("markov", {"section": {"projector_type": "domino"}},
     "'MarkovDraftModel' but .* 'domino'; set it to 'markov'"),
    ("markov", {"section": {"projector_type": None}}, "'MarkovDraftModel' but .* None"),
    ("markov", {"config": {"architectures": ["DominoDraftModel"]}},
     "'DominoDraftModel' but .* 'markov'; set it to 'domino'"),
    ("markov", {"section": {"gru_hidden_dim": 12}}, "gru_hidden_dim is 12 but .*'markov', a head"),
]  # fmt: skip
MISSING: list[Case] = [
    *(("domino", {"config": {name: None}}, f"lacks {name}") for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "vocab_size", "block_size")),
    *(("domino", {"section": {name: None}}, rf"lacks dflash_config\.{name}") for name in (
        "mask_token_id", "target_layer_ids", "emb_dim", "gru_hidden_dim")),
    ("domino", {"config": {"rope_theta": None, "rope_parameters": None}}, "lacks rope_theta"),
]  # fmt: skip
WRONG_TYPES: list[Case] = [
    *(("domino", {"config": {name: value}}, rf"{name} is .*; expected") for name, value in (
        ("hidden_size", "16"), ("hidden_size", True), ("rms_norm_eps", "1e-6"), ("layer_types", 2),
        ("dflash_config", []), ("rope_parameters", 3), ("domino_spec", "x"))),
    ("domino", {"section": {"shift_label": "false"}}, r"shift_label is 'false'; .*true or"),
    ("domino", {"section": {"mask_token_id": True}}, "mask_token_id is True; expected a whole"),
]  # fmt: skip
OTHER_ARITHMETIC: list[Case] = [
    *(("domino", {"config": {name: value}}, name) for name, value in (
        ("attention_bias", True), ("mlp_bias", True), ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5), ("quantization_config", {"bits": 4}),
        ("target_hidden_size", 32), ("model_type", "llama"))),
    *(("domino", {"section": {name: value}}, rf"dflash_config\.{name}") for name, value in (
        ("use_swa", True), ("selector_rank", 8), ("target_hidden_size", 32), ("causal", True))),
    ("domino", {"section": {"projector_type": "dspark"}}, "projector_type is 'dspark'.*'markov'"),
    *(("domino", {"config": {"architectures": names}}, rf"architectures = \[{str(names)[1:-1]}")
      for names in (["Qwen3ForCausalLM"], ["DFlash2DraftModel"], [])),
    *(("domino", {"config": {"rope_theta": None, "rope_parameters": rope}}, named)
      for rope, named in (
        ({"rope_type": "spiral", "rope_theta": 1.0}, "'spiral'"),
        ({"full_attention": {"rope_theta": 1.0}}, r"rope_parameters\.full_attention"),
        ({"rope_theta": 1.0, "partial_rotary_factor": 0.25}, r"partial_rotary_factor is 0\.25"))),
]  # fmt: skip
ZEROS = torch.zeros
WRONG_TENSORS: list[Case] = [
    ("domino", {"tensors": {"layers.1.mlp.up_proj.weight": None}},
     r"lacks 1 tensor: 'layers\.1\.mlp\.up_proj\.weight' \[24, 16\]"),
    ("domino", {"config": {"num_hidden_layers": 3, "layer_types": None}},
     r"lacks 11 tensors: 'layers\.2\..* and 6 more"),
    ("domino", {"tensors": {"layers.2.mlp.up_proj.weight": ZEROS(24, 16)}},
     r"holds 1 tensor: 'layers\.2\.mlp\.up_proj\.weight' \[24, 16\]"),
    ("domino", {"tensors": {"lm_head.weight": ZEROS(48, 16)}}, r"'lm_head.weight' \[48, 16\]"),
    ("domino", {"section": {"projector_type": None}},
     r"'embed_proj\.0\.weight'.*declares no Domino head"),
    ("markov", {"config": {"architectures": ["DFlashDraftModel"]},
                "section": {"projector_type": None}},
     r"'markov_w1\.weight'.*declares no Markov head"),
    ("dflash", {"section": {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 12,
                            "shift_label": True}},
     r"lacks 4 tensors: 'prefix_gru\.weight_ih_l0' \[36, 16\]"),
    ("domino", {"section": {"projector_type": "markov", "gru_hidden_dim": None}},
     r"lacks 2 tensors: 'markov_w1\.weight'"),
    ("markov", {"tensors": {"markov_w1.weight": None}}, r"lacks 1 tensor: 'markov_w1.weight'"),
    ("domino", {"tensors": {"prefix_gru.bias_ih_l0": ZEROS(36)}}, r"'prefix_gru\.bias_ih_l0'"),
    *(("domino", {"tensors": {name: ZEROS(3, 5)}}, rf"'{name}' is \[3, 5\], expected \[{shape}\]")
      for name, shape in (("fc.weight", "16, 48"), ("norm.weight", "16"),
                          ("prefix_gru.weight_hh_l0", "36, 12"))),
    ("markov", {"tensors": {"markov_w1.weight": ZEROS(47, 6)}},
     r"'markov_w1.weight' is \[47, 6\], expected \[48, 6"),
    ("domino", {"config": {"vocab_size": 64}},
     r"vocabulary mismatch: tensor 'embed_proj\.2\.weight' is \[48, 6\].*48 tokens.*says 64"),
    ("markov", {"tensors": {"markov_w2.weight": ZEROS(40, 6)}},
     r"vocabulary mismatch: tensor 'markov_w2\.weight'"),
    ("domino", {"tensors": {"logit_head.embed_proj.0.weight": ZEROS(6, 28)}},
     r"'embed_proj.0.weight'.*both 'embed_proj.0.weight'"),
    *(("domino", {"tensors": {"fc.weight": ZEROS(16, 48).to(dtype)}},
       r"'fc\.weight' is (I8|F8).*expected one of .*BF16")
      for dtype in (torch.int8, torch.float8_e4m3fn)),
    ("reduced", {"tensors": {"d2t": None}},
     r"draft_vocab_size = 4 of 48 tokens.*lacks tensor 'd2t' \[4\]"),
    ("reduced", {"tensors": {"d2t": ZEROS(5, dtype=torch.long)}},
     r"'d2t' is \[5\] of I64, expected \[4\]"),
    ("reduced", {"tensors": {"d2t": ZEROS(4)}}, r"'d2t' is \[4\] of F32, expected \[4\] whole"),
]  # fmt: skip
REFUSED = [*DISAGREEING, *MISSING, *WRONG_TYPES, *OTHER_ARITHMETIC, *WRONG_TENSORS]


@pytest.mark.parametrize(("kind", "changes", "named"), REFUSED)
def test_refusals_of_the_public_layout(kind: str, changes: Any, named: str, tmp_path: Path) -> None:
    """By the header alone and by loading, in the same words."""
    folder = bent(tmp_path, kind, **changes)
    for read in (describe, load_drafter):
        with pytest.raises(DominoError, match=named):
            read(folder)


@pytest.mark.parametrize(
    ("kind", "offsets", "named"),
    [
        ("reduced", [3, 0, 46, 17], r"d2t\[2\] maps to target id 48"),
        ("reduced", [-1, 0, 38, 17], r"d2t\[0\] maps to target id -1"),
        ("reduced", [3, 2, 38, 17], "d2t maps 2 draft tokens to target id 3; .* download"),
        ("domino", [1, -1] + [0] * 46, "d2t reorders the vocabulary"),
    ],
)
def test_a_map_of_wrong_ids(kind: str, offsets: list[int], named: str, tmp_path: Path) -> None:
    folder = bent(tmp_path, kind, tensors={"d2t": torch.tensor(offsets)})
    with pytest.raises(DominoError, match=named):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {"speculators_model_type": "eagle3"}}, "speculators_model_type is 'eagle3'"),
        ({"config": {"projector_type": "dspark"}}, "projector_type is 'dspark'"),
        ({"config": {"projector_type": "dflash"}}, "projector_type is 'dflash'"),
        ({"config": {"target_hidden_size": 32}}, "target_hidden_size is 32"),
        ({"config": {"mask_token_id": None}}, "lacks mask_token_id"),
        ({"config": {"aux_hidden_state_layer_ids": None}}, "lacks aux_hidden_state_layer_ids"),
        ({"config": {"aux_hidden_state_layer_ids": [0, 5, 7]}}, r"is \[0, 5, 7\].*from 1"),
        ({"config": {"sample_from_anchor": False, "shift_label": True}},
         "sample_from_anchor is False but shift_label is True"),
        ({"config": {"emb_dim": 7}}, "logits_correction_emb_dim is 6 but emb_dim is 7"),
        ({"layer": {"hidden_size": None}}, r"lacks transformer_layer_config\.hidden_size"),
        ({"layer": {"attention_bias": True}}, r"transformer_layer_config\.attention_bias"),
    ],
)  # fmt: skip
def test_refusals_of_the_speculators_layout(changes: Any, named: str, tmp_path: Path) -> None:
    folder = bent(tmp_path, "domino", "speculators", **changes)
    with pytest.raises(DominoError, match=named):
        describe(folder, num_target_layers=8)
