"""`domino bench TARGET`."""

import json

import pytest
import transformers as tf

from domino_spec.checkpoints import save_drafter
from domino_spec.drafter import Medusa, MedusaConfig
from domino_spec.drafters.registry import NAMED
from domino_spec.records import read_records
from tests.cli import tiny
from tests.support.drafters import ScriptedDrafter
from tests.support.families import randomise

QUICK = ("-n", 16, "--shortest-answer", 4, "--limit", 2, "--repeats", 1)


def test_a_target_alone_is_enough_to_run(domino, target, draft, dflash, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "r.jsonl"
    arguments = ("bench", target, "--draft", draft, "--draft", dflash, "--prompts", "chat", *QUICK)
    result = domino(*arguments, "--out", out)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["chat", "0", "1", "domino"] in [line[:4] for line in lines]
    assert "all on the engine" in result.stderr
    assert "domino report" in result.stderr
    before = out.read_text()
    again = domino(*arguments, "--out", out, "--json")  # nothing is left to do
    assert again.exit_code == 0, again.output
    assert out.read_text() == before
    found = json.loads(again.stdout)
    (cell,) = found["cells"]
    assert cell["used"] + cell["loops"] + cell["short"] == 2
    assert set(cell["methods"]) == {"plain", "domino", "dflash"}
    assert all(m["same"] == m["compared"] for m in cell["methods"].values())
    refused = domino(*arguments, "--out", out, "--seed", 1)
    assert refused.exit_code == 1
    assert "settings seed" in refused.stderr
    slower = domino(*arguments, "--out", out, "--attn-implementation", "eager")
    assert slower.exit_code == 1
    assert "target attention" in slower.stderr


def test_the_default_file_is_named_after_target_and_run(domino, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 0, 1):
        result = domino("bench", "run", target, "--prompts", "maths", "--seed", seed, *QUICK)
        assert result.exit_code == 0, result.output
    names = sorted(path.name for path in tmp_path.glob("bench-*.jsonl"))
    assert len(names) == 2


def test_a_new_kind_of_drafter_is_one_line(domino, target, tmp_path, monkeypatch):
    def scripted(source, loaded):
        depth = int(source.partition(":")[2])
        return ScriptedDrafter([[0]] * 99, depth=depth, vocab=loaded.target.vocab_size)

    monkeypatch.setitem(NAMED, "scripted", scripted)
    out = tmp_path / "r.jsonl"
    result = domino(
        "bench", target, "--draft", "scripted:3", "--prompts", "code", *QUICK, "--out", out
    )
    assert result.exit_code == 0, result.output
    assert "all in the reference loop: as for scripted" in result.stderr
    facts = read_records(out)[0]["facts"]
    assert facts["settings"]["engine"] == "reference"
    refused = domino("bench", target, "--draft", "scripted:3", "--engine", "fast", *QUICK)
    assert refused.exit_code == 1
    assert "Take --engine reference" in refused.stderr


def test_all_kinds_run_on_the_engine_as_in_the_reference_loop(domino, target, draft, tmp_path):
    config = MedusaConfig(
        hidden_size=tiny.HIDDEN, vocab_size=tiny.VOCAB, num_target_layers=tiny.LAYERS, num_heads=3
    )
    save_drafter(Medusa.fresh(config, seed=0), tmp_path / "medusa")
    drafters = ("--draft", draft, "--draft", tmp_path / "medusa", "--draft", "lookup:4")
    cells = ("--prompts", "chat", "-t", 0, "-t", 0.8, "-b", 2)
    found = {}
    for engine in ("fast", "reference"):
        out = tmp_path / f"{engine}.jsonl"
        arguments = ("bench", target, *drafters, *cells, *QUICK, "-n", 8, "--engine", engine)
        result = domino(*arguments, "--out", out, "--json")
        assert result.exit_code == 0, result.output
        found[engine] = json.loads(result.stdout)
    assert len(found["fast"]["cells"]) == 2
    for fast, reference in zip(*(run["cells"] for run in found.values()), strict=True):
        assert fast["units"] == reference["units"] > 0
        assert set(fast["methods"]) == {"plain", "domino", "medusa", "lookup:4"}
        for name, method in fast["methods"].items():
            other = reference["methods"][name]
            assert method["same"] == method["compared"] == other["compared"]
            assert method["cycle_ms"]["verify"] > 0
    # Figures of one way to run do not join a file of another.
    mixed = domino(*arguments, "--out", tmp_path / "fast.jsonl")
    assert mixed.exit_code == 1
    assert "settings engine" in mixed.stderr


def test_a_target_that_only_transformers_runs(domino, tmp_path):
    other = tmp_path / "other"
    config = tf.GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=256, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    randomise(tf.GPT2LMHeadModel(config).eval(), 0.25, seed=1).save_pretrained(other)
    tiny.make_tokenizer().save_pretrained(other)
    arguments = ("bench", other, "--draft", "lookup", "--prompts", "chat", *QUICK)
    out = tmp_path / "r.jsonl"
    result = domino(*arguments, "--out", out)
    assert result.exit_code == 0, result.output
    assert "all in the reference loop: as for the target, it is a GPT2LMHeadModel" in result.stderr
    assert read_records(out)[0]["facts"]["settings"]["engine"] == "reference"
    refused = domino(*arguments, "--engine", "fast")
    assert refused.exit_code == 1
    assert "it is a GPT2LMHeadModel" in refused.stderr
    assert "Take --engine reference" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompts", "nothing.jsonl"), "there is no nothing.jsonl"),
        (("-t", "-1"), "expected 0 or more"),
        (("-b", "2", "-b", "2"), "given twice"),
        (("--repeats", "0"), "repeats is 0"),
        (("--draft", "lookup:3", "--draft", "lookup:3"), "given twice"),
        (("-n", "5000"), "leaves no room"),
    ],
)
def test_what_makes_no_sense_is_one_line(domino, target, arguments, words):
    result = domino("bench", target, *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["bench", "audit"])
def test_a_system_message_that_nobody_would_hear_is_refused(domino, base_target, command):
    result = domino(command, base_target, "--draft", "lookup", "--system", "Be brief.")
    assert result.exit_code == {"bench": 1, "audit": 2}[command]
    assert "needs a chat template" in result.stderr


def test_help_shows_both_commands(domino):
    result = domino("bench", "--help")
    assert result.exit_code == 0
    for word in ("run", "engine"):
        assert word in result.stdout
