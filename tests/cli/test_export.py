from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from domino_spec.checkpoints import (
    Provenance,
    describe,
    files,
    load_drafter,
    save_drafter,
    save_packed,
)
from domino_spec.checkpoints.exports import FORMATS
from domino_spec.drafter import DraftModel
from domino_spec.drafters import BlockDrafter
from tests.cli import tiny
from tests.cli.test_errors import errors_of
from tests.support.families import randomise
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.runs import run

PROVENANCE = Provenance(target_id="org/target", license="Apache-2.0", created_with="a trainer")


@pytest.fixture
def packed(tmp_path):
    drafter = randomise(DraftModel.untrained(tiny.drafter_config()), 0.3)
    return save_packed(drafter, tmp_path / "packed", bits=6, provenance=PROVENANCE)


def weights(folder):
    return load_drafter(folder).drafter.state_dict()


def test_a_packed_drafter_becomes_a_public_one(domino, packed, tmp_path):
    out = tmp_path / "public"
    result = domino("export", packed, out)
    assert result.exit_code == 0, result.output
    assert f"wrote {out}: public layout" in result.stdout
    described = describe(out)
    assert (described.layout, described.dtypes) == ("public", ("BF16",))
    found, expected = weights(out), weights(packed)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert described.provenance.target_id == "org/target"
    assert described.provenance.license == "Apache-2.0"
    assert described.provenance.created_with == "a trainer"


def test_both_forms_decode_alike(domino, tmp_path):
    """The same answer in the same cycles, with a drafter whose drafts are accepted."""
    target, built = bigram_target(), knowing_drafter(shift=True, prefix=1)
    packed = save_packed(built, tmp_path / "packed", bits=4)
    assert domino("export", packed, tmp_path / "public", "--to", "hf").exit_code == 0
    runs = []
    for source in (packed, tmp_path / "public"):
        drafter = load_drafter(source, dtype=torch.float32).drafter
        proposer = BlockDrafter(drafter).with_depth(drafter.config.default_depth)
        answers, stats = run(target, proposer, [[3, 5], [7]], max_new_tokens=30)
        runs.append((answers, stats.acceptance))
    assert runs[0] == runs[1]
    assert runs[0][1].tokens_per_cycle > 4


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_packing_from_the_command_line(domino, draft, tmp_path, bits):
    out = tmp_path / "small"
    result = domino("export", draft, out, "--pack", bits, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["layout"] == "packed"
    assert values["dtypes"] == [f"{bits}-bit", "BF16"]
    assert values["bytes"] == describe(out).byte_count < describe(draft).byte_count
    assert values["folder"] == str(out)


def test_provenance_survives_packing(domino, packed, tmp_path):
    assert domino("export", packed, tmp_path / "again", "--pack", 4).exit_code == 0
    assert describe(tmp_path / "again").provenance.target_id == "org/target"


def test_a_released_name_is_a_source(domino, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_ROOT", packed.parent)
    assert domino("export", "released:packed", tmp_path / "a" / "out").exit_code == 0
    result = domino("export", "released:other", tmp_path / "new")
    assert "came: released:packed. Give" in errors_of(result)[0]


@pytest.mark.parametrize(
    ("dtype", "stored"), [("auto", "F32"), ("float32", "F32"), ("float16", "F16"), (None, "BF16")]
)
def test_types(domino, draft, tmp_path, dtype, stored):
    options = () if dtype is None else ("--dtype", dtype)
    assert domino("export", draft, tmp_path / "out", *options).exit_code == 0
    assert describe(tmp_path / "out").dtypes == (stored,)


@pytest.mark.parametrize("to", ["hf", "sglang", "speculators", "vllm", "vllm-dspark"])
def test_forms_for_other_engines(domino, packed, tmp_path, to):
    """Bit for bit the same drafter, whatever the form."""
    out = tmp_path / to
    result = domino("export", packed, out, "--to", to, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["form"] == to
    assert values["layout"] == ("speculators" if to == "speculators" else "public")
    checkpoint = load_drafter(out)
    assert checkpoint.config == load_drafter(packed).config
    assert checkpoint.provenance.target_id == "org/target"
    found, expected = weights(out), weights(packed)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_help_names_every_form(domino):
    text = " ".join(domino("export", "--help").stdout.replace("│", " ").split())
    assert all(f" {name} (" in text for name in FORMATS)


def test_the_line_says_what_a_folder_is_for(domino, draft, tmp_path):
    assert (
        "public layout for vllm, " in domino("export", draft, tmp_path / "a", "--to", "vllm").stdout
    )
    line = domino("export", draft, tmp_path / "b", "--to", "speculators").stdout
    assert "speculators layout, " in line


@pytest.fixture
def reduced(tmp_path_factory):
    """A drafter that proposes five tokens, in float32."""
    config = replace(tiny.drafter_config(), draft_vocab_size=5)
    drafter = DraftModel.untrained(config)
    drafter.draft_tokens = torch.tensor([7, 3, 250, 40, 299])
    return save_drafter(drafter, tmp_path_factory.mktemp("reduced") / "drafter")


@pytest.mark.parametrize("to", ["speculators", "vllm"])
def test_lm_head_rows_come_from_the_target(domino, reduced, target, tmp_path, to):
    out = tmp_path / "out"
    options = ("--to", to, "--target", target, "--dtype", "float32")
    result = domino("export", reduced, out, *options)
    assert result.exit_code == 0, result.output
    stored = load_file(out / "model.safetensors")["lm_head.weight"]
    lm_head = tf.AutoModelForCausalLM.from_pretrained(target).lm_head.weight
    tokens = load_drafter(out).drafter.draft_tokens
    assert tokens.tolist() == [7, 3, 250, 40, 299]
    assert torch.equal(stored, lm_head[tokens])


CASES = {
    "unknown form": ("{draft} {out} --to gguf", "--to is 'gguf'; expected one of: hf"),
    "packed for an engine": (
        "{draft} {out} --pack 8 --to vllm",
        "--pack 8 and --to vllm were both given",
    ),
    "a type SGLang cannot run": (
        "{draft} {out} --to sglang --dtype float16",
        "stored as float16; SGLang runs a Domino head in bfloat16 only",
    ),
    "a target nobody needs": (
        "{draft} {out} --to vllm --target {target}",
        "--to vllm of this drafter stores nothing of a target; drop it",
    ),
    "a target and packed": (
        "{draft} {out} --pack 8 --target {target}",
        "--pack 8 stores nothing of a target",
    ),
    "a reduced vocabulary without its target": (
        "{reduced} {out} --to vllm",
        "Name its target (--target TARGET)",
    ),
    "a reduced vocabulary and another target": (
        "{reduced} {out} --to vllm --target {wide}",
        "hidden size 32, expected 64",
    ),
    "a reduced vocabulary in SGLang": (
        "{reduced} {out} --to sglang",
        "5 of 300 tokens; SGLang serves the target's whole vocabulary only",
    ),
    "packed and typed": (
        "{draft} {out} --pack 8 --dtype float32",
        "--pack 8 and --dtype float32 were both given",
    ),
    "no drafter": ("./nothing {out}", "no file or folder"),
    "a target": ("{target} {out}", "not a DFlash or Domino drafter"),
    "a file in the way": ("{draft} {file}", "is a file"),
    "a checkpoint in the way": ("{draft} {draft}", "already holds a checkpoint"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line_and_writes_nothing(
    case, domino, draft, reduced, target, wide_target, tmp_path
):
    (tmp_path / "file").write_text("")
    arguments, expected = CASES[case]
    out = tmp_path / "out"
    names = {"draft": draft, "target": target, "out": out, "file": tmp_path / "file"}
    names |= {"reduced": reduced, "wide": wide_target}
    result = domino("export", *(argument.format(**names) for argument in arguments.split()))
    assert result.exit_code == 1
    (line,) = errors_of(result)
    assert expected in line
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unknown_bits_are_a_usage_error(domino, draft, tmp_path):
    result = domino("export", draft, tmp_path / "out", "--pack", 5)
    assert result.exit_code == 2
    assert "'8', '6', '4'" in result.output


def test_a_checkpoint_is_replaced_when_asked(domino, draft, packed):
    assert domino("export", draft, packed).exit_code == 1
    assert describe(packed).layout == "packed"
    assert domino("export", draft, packed, "--force").exit_code == 0
    assert describe(packed).layout == "public"


def test_info_shows_how_a_drafter_is_packed(domino, packed, draft):
    text = " ".join(domino("info", packed).stdout.split())
    assert "layout packed" in text
    assert "6-bit, BF16" in text
    assert "tensors of 6 bits, groups of 64" in text
    values = json.loads(domino("info", packed, "--json").stdout)
    assert values["packing"]["group_size"] == 64
    assert set(values["packing"]["bits"].values()) == {6}
    assert values["parameters"]["total"] > values["bytes"]
    assert json.loads(domino("info", draft, "--json").stdout)["packing"] is None
