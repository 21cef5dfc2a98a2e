from __future__ import annotations

import json

import pytest

from domino_spec.checkpoints import Provenance, chat_template_fingerprint, tokenizer_fingerprint
from tests.cli import tiny


def document(result):
    return json.loads(result.stdout)


def test_a_domino_checkpoint(domino, draft):
    result = domino("info", draft)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "layout public",
        "Domino (backbone and causal head)",
        "GRU 16, rank 8, pure draft prefix 1",
        "block size 8",
        "shift: slot 0",
        "7 by default (8 tokens verified), at most 8 (9 tokens verified)",
        "layers 0, 2 of 3",
        "mask token 4",
        "sliding layers none",
        "target id unknown",
        "license unknown",
    ):
        assert part in text
    values = document(domino("info", draft, "--json"))
    assert values["kind"] == "domino"
    assert values["parameters"]["head"] > 0
    assert values["parameters"]["total"] * 4 == values["bytes"]
    assert values["config"]["head"]["gru_hidden_dim"] == 16
    assert values["depth"] == {
        "default": 7,
        "default_rows_verified": 8,
        "maximum": 8,
        "maximum_rows_verified": 9,
    }
    assert values["provenance"]["target_id"] is None
    assert values["fit"] is None


def test_a_dflash_checkpoint(domino, dflash):
    text = " ".join(domino("info", dflash).stdout.split())
    assert "DFlash (backbone alone)" in text
    assert "no-shift: slot 1" in text
    assert "7 by default (8 tokens verified), at most 7 (8 tokens verified)" in text
    values = document(domino("info", dflash, "--json"))
    assert values["kind"] == "dflash"
    assert values["parameters"]["head"] == 0
    assert values["alignment"] == "no-shift"


def test_a_fitting_target_with_unknown_provenance(domino, draft, target):
    result = domino("info", draft, "--target", target)
    assert result.exit_code == 0, result.output
    assert "nothing speaks against this target" in result.stdout
    fit = document(domino("info", draft, "--target", target, "--json"))["fit"]
    verdicts = {check["name"]: check["verdict"] for check in fit["checks"]}
    assert fit["verdict"] == "unknown"
    assert (
        verdicts["hidden size"]
        == verdicts["vocabulary"]
        == verdicts["captured hidden states"]
        == "ok"
    )
    assert verdicts["tokenizer"] == "unknown"


def test_provenance_is_compared_with_the_targets_files(domino, target, tmp_path):
    tokenizer = tiny.make_tokenizer()
    provenance = Provenance(
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        chat_template_sha256=chat_template_fingerprint(tokenizer),
        thinking="off",
        license="Apache-2.0",
    )
    folder = tiny.save_draft(tmp_path / "draft", provenance)
    run = domino("info", folder, "--target", target, "--no-thinking", "--json")
    assert run.exit_code == 0
    verdicts = {c["name"]: c["verdict"] for c in document(run)["fit"]["checks"]}
    assert verdicts["tokenizer"] == verdicts["chat template"] == verdicts["thinking mode"] == "ok"
    other_mode = domino("info", folder, "--target", target, "--thinking")
    assert other_mode.exit_code == 1
    assert "Apache-2.0" in other_mode.stdout


def test_a_target_that_does_not_fit_exits_with_1(domino, draft, wide_target):
    result = domino("info", draft, "--target", wide_target)
    assert result.exit_code == 1
    assert "does not fit this target" in result.stdout
    assert "mismatch" in result.stdout
    machine = domino("info", draft, "--target", wide_target, "--json")
    assert machine.exit_code == 1
    fit = document(machine)["fit"]
    (check,) = [check for check in fit["checks"] if check["verdict"] == "mismatch"]
    assert (check["name"], check["found"], check["expected"]) == ("hidden size", 32, 64)
    assert check["advice"]


def test_a_target_of_another_depth_is_a_row_of_the_table(domino, draft, tmp_path, target):
    import transformers

    config = transformers.AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 4
    config.save_pretrained(tmp_path)
    fit = document(domino("info", draft, "--target", tmp_path, "--json"))["fit"]
    mismatched = [check["name"] for check in fit["checks"] if check["verdict"] == "mismatch"]
    assert mismatched == ["target layers"]


def test_gaps_in_the_config_are_filled_from_the_command_line(domino, tmp_path, target):
    folder = tiny.save_draft(tmp_path / "draft")
    values = json.loads((folder / "config.json").read_text())
    values["dflash_config"].pop("shift_label")
    values.pop("num_target_layers")
    (folder / "config.json").write_text(json.dumps(values))
    silent = domino("info", folder, "--target", target)
    assert silent.exit_code == 1
    assert "shift_label" in silent.stderr
    assert domino("info", folder, "--target", target, "--shift-label").exit_code == 0


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_is_no_drafter(domino, target, flags):
    result = domino("info", target, *flags)
    assert result.exit_code == 1
    assert "not a DFlash or Domino drafter" in result.stderr
    assert "Traceback" not in result.output
