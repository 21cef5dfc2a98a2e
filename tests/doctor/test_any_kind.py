"""The doctor on drafters that are no block drafters: what they have is examined."""

import json

import pytest
import torch
from typer.testing import CliRunner

from domino_spec.cli.main import app
from domino_spec.doctor.reading import needs
from domino_spec.doctor.settings import Plans
from domino_spec.drafter import Medusa, MedusaConfig
from domino_spec.drafters import describe_drafter
from domino_spec.engine.recurrent import read_delta_shape
from domino_spec.errors import InputError
from domino_spec.targets import load_config
from tests.doctor import chatty
from tests.support.baselines import knowing_eagle3, knowing_medusa
from tests.support.families import CONFIGS

BLOCK_ONLY = {"alignment", "mask token", "mask token text", "mask token, measured"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return chatty.save_target(tmp_path_factory.mktemp("target"))


def knowing(kind):
    if kind == "medusa":
        return knowing_medusa(table=chatty.successors())
    return knowing_eagle3(size=chatty.SIZE)


def examine(target, draft, *options):
    arguments = ["doctor", target, "--draft", draft, "--json", *options]
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    values = json.loads(result.stdout)
    assert "findings" in values, result.output
    return {f["name"]: f for f in values["findings"]}, result.exit_code


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_sound_baseline_gives_no_complaint(target, tmp_path, kind):
    provenance = chatty.known(tokens_per_cycle=5.0)
    folder = chatty.save(tmp_path / kind, knowing(kind), provenance)
    findings, code = examine(target, folder)
    states = {n: f["state"] for n, f in findings.items() if f["state"] in ("warning", "problem")}
    assert (states, code) == ({}, 0)
    assert findings["acceptance length"]["found"].startswith(("4.", "5."))
    assert findings["acceptance length"]["expected"] == "5.00 in training"
    assert findings["engine"]["found"] == "runs this pair"
    assert findings["captured hidden states"]["state"] == "ok"
    assert not BLOCK_ONLY & set(findings)


def test_a_baseline_for_another_target_is_caught(target, tmp_path):
    wrong = knowing_medusa(table=chatty.successors(seed=9))
    findings, code = examine(target, chatty.save(tmp_path / "draft", wrong))
    assert code == 1
    advice = findings["acceptance length"]["advice"]
    assert "whatever the prompt format" in advice
    assert "another target" in advice


def test_a_baseline_of_another_shape_is_not_loaded(target, tmp_path):
    config = MedusaConfig(hidden_size=16, vocab_size=50, num_target_layers=2, num_heads=2)
    folder = chatty.save(tmp_path / "draft", Medusa.fresh(config, seed=0))
    findings, code = examine(target, folder)
    assert code == 1
    assert findings["hidden size"]["state"] == findings["vocabulary"]["state"] == "problem"
    assert "acceptance length" not in findings


def test_lookup_has_nothing_to_be_set_up_wrong(target):
    findings, code = examine(target, "lookup:4", "--context", 100)
    assert code == 0
    assert findings["context"]["state"] == "ok"
    assert findings["type"]["found"] == "nothing is stored"
    assert findings["acceptance length"]["expected"] == "nothing is trained"
    assert not (BLOCK_ONLY | {"hidden size", "prompt format"}) & set(findings)
    too_long, code = examine(target, "lookup", "--no-measure", "--context", 9999)
    assert (code, too_long["context"]["state"]) == (1, "problem")


def test_memory_of_every_kind_is_counted(target, tmp_path):
    config = load_config(target)

    def need(spec):
        described = describe_drafter(spec)
        return needs(config, described, Plans(), dtype=torch.float32, context=100)

    folders = {k: chatty.save(tmp_path / k, knowing(k)) for k in ("medusa", "eagle3")}
    heads, chain, nothing = (need(s) for s in (folders["medusa"], folders["eagle3"], "lookup"))
    assert heads["drafter"] == 4 * sum(p.numel() for p in knowing("medusa").parameters())
    assert chain["drafter"] == 4 * sum(p.numel() for p in knowing("eagle3").parameters())
    assert nothing["drafter"] == 0
    assert heads["caches"] == nothing["caches"] < chain["caches"]
    with pytest.raises(InputError, match="drafts nothing"):
        describe_drafter("plain")


def test_states_of_a_hybrid_are_counted_by_sequence_and_not_by_token():
    config, described = CONFIGS["qwen3_5_text"](), describe_drafter("lookup")

    def caches(rows, context):
        plans = Plans(rows=rows)
        return needs(config, described, plans, dtype=torch.float32, context=context)["caches"]

    block = described.drafts + 1
    states = 2 * read_delta_shape(config).slot_bytes(block, torch.float32)
    attention = 4 * 2 * 2 * 8  # bytes a token of the one layer that attends
    assert caches(3, 100) == 3 * (states + 100 * attention)
