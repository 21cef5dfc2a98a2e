"""Each fault is caught by name, on a drafter that is nearly always right; a sound pair is not."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from domino_spec.checkpoints import Provenance
from domino_spec.cli.main import app
from domino_spec.decoding import AcceptanceStats
from domino_spec.doctor.measuring import clearly_better
from domino_spec.doctor.reading import Finding, needs, read_tokenizer, worst
from domino_spec.doctor.settings import Plans
from domino_spec.drafters import describe_drafter
from domino_spec.targets import load_config
from tests.cli import tiny
from tests.doctor import chatty


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return chatty.save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def examine(target, tmp_path):
    """Findings of a drafter, by name, and the exit code."""
    from typer.testing import CliRunner

    def run(drafter, *options, provenance=None, on=target):
        folder = chatty.save(tmp_path / "draft", drafter, provenance)
        arguments = ["doctor", on, "--draft", folder, "--json", *options]
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        values = json.loads(result.stdout)
        assert "findings" in values, result.output
        return {f["name"]: f for f in values["findings"]}, result.exit_code

    return run


def complaints(findings):
    return {n: f["state"] for n, f in findings.items() if f["state"] in ("warning", "problem")}


def test_a_sound_pair_gives_no_complaint(examine):
    """Nor does one whose training is known: see the table below."""
    every = ("--candidates", chatty.SIZE)
    findings, code = examine(chatty.knowing(), *every, provenance=Provenance())
    assert complaints(findings) == {}
    assert code == 0
    assert findings["alignment"]["state"] == "ok"
    assert findings["acceptance length"]["found"].startswith("7.")
    assert findings["engine"]["found"] == "runs this pair"


@pytest.mark.parametrize("really", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_other_alignment_is_caught(examine, really):
    right = chatty.knowing(shift=really, prefix=1 if really else 0)
    wrong = chatty.knowing(shift=not really, prefix=1 if really else 0)
    wrong.load_state_dict(right.state_dict())
    findings, code = examine(wrong, provenance=chatty.known())
    assert code == 1
    assert findings["alignment"]["state"] == "problem"
    assert (
        f"shift_label in its config.json to {str(really).lower()}"
        in (findings["alignment"]["advice"])
    )
    assert "Mend what is named above" in findings["acceptance length"]["advice"]
    if not really:  # else it is the sound pair
        assert examine(right)[0]["alignment"]["state"] == "ok"


def test_another_target_is_caught_by_what_is_accepted(examine, tmp_path):
    other = chatty.save_target(tmp_path / "other", seed=9)
    findings, code = examine(chatty.knowing(prefix=0, mask=None), on=other)
    assert code == 1
    assert findings["acceptance length"]["state"] == "problem"
    assert "another target" in findings["acceptance length"]["advice"]


def test_another_target_is_caught_by_its_name(examine, monkeypatch):
    monkeypatch.setattr("domino_spec.checkpoints.fit._is_hub_id", lambda _: True)
    provenance = chatty.known(target_id="org/other")
    findings, _ = examine(chatty.knowing(), "--no-measure", provenance=provenance)
    assert findings["target id"]["state"] == "warning"


def test_another_shape_is_a_problem_and_nothing_is_loaded(examine, tmp_path):
    other = tiny.save_target(tmp_path / "other", tokenizer=tiny.make_tokenizer())
    findings, code = examine(chatty.knowing(), on=other)
    assert code == 1
    assert findings["hidden size"]["state"] == findings["vocabulary"]["state"] == "problem"
    assert "alignment" not in findings


def test_another_mask_token_is_caught(examine):
    drafter = chatty.knowing()
    drafter.config = dataclasses.replace(drafter.config, mask_token_id=42)
    findings, code = examine(drafter, provenance=chatty.known())
    assert code == 1
    assert findings["mask token, measured"]["state"] == "problem"
    assert f"mask_token_id to {chatty.MASK}" in findings["mask token, measured"]["advice"]
    assert findings["mask token text"]["state"] == "warning"  # 42 is text
    assert findings["alignment"]["state"] == "ok"


def test_a_stale_tokenizer_is_caught_by_its_fingerprint(examine):
    provenance = chatty.known(tokenizer_sha256="0" * 64)
    findings, code = examine(chatty.knowing(), "--no-measure", provenance=provenance)
    assert (code, findings["tokenizer"]["state"]) == (1, "problem")


def test_a_stale_tokenizer_is_caught_by_what_it_does(examine, tmp_path, monkeypatch):
    kept = [token for token in tiny.SPECIALS if token != "<|assistant|>"]
    monkeypatch.setattr(tiny, "SPECIALS", kept)
    stale = chatty.save_target(tmp_path / "stale")
    findings, code = examine(chatty.knowing(), "--no-measure", on=stale)
    assert code == 1
    assert findings["chat markers"]["state"] == "problem"
    assert "<|assistant|> in pieces" in findings["chat markers"]["found"]


def test_a_tokenizer_of_a_later_version_is_caught(examine, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "VOCAB", chatty.SIZE + 20)
        patch.setattr(tiny, "LINES", [f"word{n} thing{n * 7}" for n in range(200)])
        later = tiny.make_tokenizer()
    larger = chatty.save_target(tmp_path / "larger", tokenizer=later)
    findings, _ = examine(chatty.knowing(), "--no-measure", on=larger)
    assert findings["tokenizer ids"]["state"] == "problem"


@pytest.mark.parametrize(("asked", "state"), [(100, "ok"), (200, "warning"), (600, "problem")])
def test_a_context_too_long_is_caught(examine, asked, state):
    options = ("--no-measure", "--context", asked)
    findings, code = examine(chatty.knowing(), *options, provenance=chatty.known())
    assert findings["context"]["state"] == state  # trained on 128, the target takes 512
    assert code == (1 if state == "problem" else 0)
    assert ("128" in findings["context"]["advice"]) == (state == "warning")


def test_another_chat_template_is_caught_by_its_fingerprint(examine):
    provenance = chatty.known(chat_template_sha256="0" * 64)
    findings, _ = examine(chatty.knowing(), "--no-measure", provenance=provenance)
    assert findings["chat template"]["state"] == "warning"


def test_another_chat_template_is_caught_by_what_is_accepted(examine):
    """The drafter knows what follows plain text, but not what follows the template's end."""
    drafter, token = chatty.knowing(), chatty.successors()[chatty.ASSISTANT]
    with torch.no_grad():
        for _ in range(40):
            drafter.head.embed_proj[2].weight[:, token] = 0.0
            token = chatty.successors()[token]
    findings, code = examine(drafter)
    assert code == 1
    assert findings["prompt format"]["state"] == "problem"
    assert "plain text" in findings["prompt format"]["advice"]


def test_fewer_tokens_than_in_training_is_a_warning(examine):
    findings, code = examine(chatty.knowing(), provenance=chatty.known(tokens_per_cycle=14.0))
    assert findings["acceptance length"]["state"] == "warning"
    assert "14.00 in training" in findings["acceptance length"]["expected"]
    assert code == 0


def test_base_logits_that_rank_badly_are_a_warning(examine):
    """This drafter's head alone knows what follows, and would not be asked about it on a GPU."""
    findings, code = examine(chatty.knowing())
    found = findings["candidates"]
    assert found["state"] == "warning"
    assert "best 32 by base logits: acceptance length 2." in found["found"]
    assert f"--candidates {chatty.SIZE}" in found["advice"]
    assert code == 0


def test_too_little_memory_is_caught_before_loading(examine, monkeypatch):
    monkeypatch.setattr("domino_spec.doctor.reading.available", lambda _: 1_000_000)
    findings, code = examine(chatty.knowing())
    (memory,) = [f for name, f in findings.items() if name.startswith("memory")]
    assert (code, memory["state"]) == (1, "problem")
    assert "--dtype bfloat16" in memory["advice"]
    assert "alignment" not in findings


def test_memory_is_counted_from_the_shapes(target, tmp_path):
    described = describe_drafter(chatty.save(tmp_path / "draft", chatty.knowing()))
    config = load_config(target)
    count = {"config": config, "described": described, "dtype": torch.float32}
    small = needs(plans=Plans(), context=100, **count)
    weights = sum(p.numel() for p in chatty.bigram_target(chatty.successors()).model.parameters())
    assert small["target"] == 4 * weights
    assert small["drafter"] == 4 * sum(p.numel() for p in chatty.knowing().parameters())
    more = needs(plans=Plans(rows=3), context=200, **count)
    assert more["caches"] == 6 * small["caches"]
    assert (more["target"], more["drafter"]) == (small["target"], small["drafter"])


def test_the_table_for_people(target, tmp_path):
    from typer.testing import CliRunner

    folder = chatty.save(tmp_path / "draft", chatty.knowing(), chatty.known())
    arguments = ["doctor", str(target), "--draft", str(folder), "--candidates", str(chatty.SIZE)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "nothing to complain about" in result.stdout
    assert "alignment" in result.stdout
    assert CliRunner().invoke(app, arguments[:2]).exit_code == 2


def test_clearly_better_is_beyond_chance():
    def trial(cycles, accepted):
        return AcceptanceStats(cycles=cycles, accepted=accepted, offered=[cycles] * len(accepted))

    good, bad = trial(20, [18, 15, 12]), trial(50, [3, 0, 0])
    assert clearly_better(good, bad)
    assert not clearly_better(bad, good)
    assert not clearly_better(trial(20, [12, 6, 3]), trial(20, [9, 5, 2]))
    assert not clearly_better(good, good)


def test_the_worst_counts():
    states = ("ok", "warning", "unknown")
    assert worst(Finding(name=s, state=s, found=None) for s in states) == "warning"
    assert worst([]) == "ok"


@pytest.mark.parametrize(("size", "state"), [(4, "ok"), (3, "problem")])
def test_the_highest_token_id_is_below_the_vocabulary(size, state):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 3}, chat_template="")
    finding = next(iter(read_tokenizer(tokenizer, SimpleNamespace(vocab_size=size))))
    assert (finding.name, finding.state) == ("tokenizer ids", state)
