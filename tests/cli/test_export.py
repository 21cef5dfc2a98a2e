from __future__ import annotations

import json

import pytest
import torch

from domino_spec.checkpoints import Provenance, describe, load_drafter, released, save_packed
from domino_spec.decoding import DominoProposer
from domino_spec.drafter import Drafter
from tests.cli import tiny
from tests.cli.test_errors import errors_of
from tests.support.families import randomise
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.runs import run

PROVENANCE = Provenance(target_id="org/target", license="Apache-2.0", created_with="a trainer")


@pytest.fixture
def packed(tmp_path):
    drafter = randomise(Drafter.untrained(tiny.drafter_config()), 0.3)
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
        proposer = DominoProposer(drafter, target, depth=drafter.config.default_depth)
        answers, stats = run(target, proposer, [[3, 5], [7]], max_new_tokens=30)
        runs.append((answers, stats.rows))
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
    monkeypatch.setattr(released, "_ROOT", packed.parent)
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


CASES = {
    "unknown form": (["{draft}", "{out}", "--to", "gguf"], "--to is 'gguf'; expected one of: hf"),
    "packed and typed": (
        ["{draft}", "{out}", "--pack", "8", "--dtype", "float32"],
        "--pack 8 and --dtype float32 were both given",
    ),
    "no drafter": (["./nothing", "{out}"], "no file or folder"),
    "a target": (["{target}", "{out}"], "not a DFlash or Domino drafter"),
    "a file in the way": (["{draft}", "{file}"], "is a file"),
    "a checkpoint in the way": (["{draft}", "{draft}"], "already holds a checkpoint"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line_and_writes_nothing(case, domino, draft, target, tmp_path):
    (tmp_path / "file").write_text("")
    arguments, expected = CASES[case]
    out = tmp_path / "out"
    names = {"draft": draft, "target": target, "out": out, "file": tmp_path / "file"}
    result = domino("export", *(argument.format(**names) for argument in arguments))
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
