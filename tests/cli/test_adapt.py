"""A bigram target's drafter on a fine-tune: another table for some of the tokens."""

from __future__ import annotations

import json
import re
import signal

import pytest
import torch
import transformers as tf

from domino_spec.checkpoints import Provenance, save_drafter
from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    Eagle3Config,
    MarkovHeadConfig,
    MedusaConfig,
)
from domino_spec.targets import load as load_module
from domino_spec.training import adapt as adapt_module
from domino_spec.training.adapt import train_config
from domino_spec.training.config import AdaptSettings, read_settings
from domino_spec.training.start import _ITS_OWN, baseline_config, derive, drafter_config
from tests.cli import tiny
from tests.support.lazy import LazyModule
from tests.support.pair import SIZE, bigram_target, knowing_drafter, successor
from tests.training.helpers import bigram_corpus

peft = LazyModule("peft")
QUICK = ["--set", "length=64", "--set", "batch_size=2", "--set", "anchors=8"]
QUICK += ["--set", "eval_tokens=20", "--set", "eval_every=100", "--set", "optimizer=adamw"]


def fine_tuned() -> torch.Tensor:
    """The base model's cycle of tokens, a part of it in another order."""
    table, cycle = successor().tolist(), [0]
    while table[cycle[-1]] != 0:
        cycle.append(table[cycle[-1]])
    cycle[4:16] = cycle[4:16][::-1]
    order = torch.tensor(cycle)
    changed = torch.full((SIZE,), cycle[0])
    changed[order] = order.roll(-1)
    return changed


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a fine-tune, its answers and the base model's drafter."""
    folder = tmp_path_factory.mktemp("adapt")
    table = fine_tuned()
    bigram_target(table).model.save_pretrained(folder / "fine-tune")
    bigram_corpus(folder, table=table)
    drafter = knowing_drafter(shift=True, prefix=1)
    with torch.no_grad():
        drafter.head.embed_proj[2].weight.mul_(0.1)  # less sure, so that it learns in a few steps
    save_drafter(drafter, folder / "drafter", provenance=Provenance(tokens_per_cycle=7.5))
    save_drafter(drafter, folder / "at-home", provenance=Provenance(tokens_per_cycle=3.5))
    save_drafter(drafter, folder / "unknown")
    return folder


@pytest.fixture
def run_adapt(domino, pair, tmp_path):
    def run(*arguments, drafter="drafter", out="run"):
        return domino(
            "adapt", pair / drafter, "--target", pair / "fine-tune",
            "--data", pair / "bigrams.npz", "--out", tmp_path / out, *QUICK, *arguments,
        )  # fmt: skip

    return run


def told(folder):
    return json.loads((folder / "adapt.json").read_text())


def test_a_fine_tunes_drafter_is_measured_before_and_after(run_adapt, domino, pair, tmp_path):
    done = run_adapt("--set", "steps=40", "--set", "learning_rate=0.01")
    assert done.exit_code == 0, done.output
    result, drafter = told(tmp_path / "run"), tmp_path / "run" / "drafter"
    before, after = result["before"], result["after"]
    assert after > before + 1
    assert (result["drafter"], result["own_target"]) == (str(drafter), 7.5)
    assert result["steps"] == 40
    assert result["seconds"] > 0
    assert "versions" in result["environment"]
    line = f"acceptance length, held out: {before:.2f} before, {after:.2f} after 40 steps in "
    assert done.stdout.startswith(line)
    assert f"the drafter is in {drafter}" in done.stdout
    assert f"{before:.2f} (7.50 on its own target)" in done.stderr
    described = json.loads(domino("info", drafter, "--json").stdout)
    assert described["provenance"]["tokens_per_cycle"] == pytest.approx(after)
    again = run_adapt()
    assert again.exit_code == 1
    assert "already holds a run at step 40" in again.stderr


def test_a_drafter_that_keeps_its_acceptance_length_is_used_as_it_is(run_adapt, pair, tmp_path):
    done = run_adapt(drafter="at-home")
    assert done.exit_code == 0, done.output
    result = told(tmp_path / "run")
    assert (result["after"], result["drafter"]) == (None, str(pair / "at-home"))
    assert result["before"] >= 0.95 * result["own_target"]
    assert "adapting would gain little" in done.stdout
    assert not (tmp_path / "run" / "drafter").exists()
    forced = run_adapt("--force", "--set", "steps=4", "--set", "learning_rate=1e-9", "--json")
    assert forced.exit_code == 0, forced.output
    result = json.loads(forced.stdout.splitlines()[-1])
    assert result["after"] == result["before"]
    assert result["drafter"] == str(tmp_path / "run" / "drafter")


def test_the_old_drafter_is_kept_where_the_new_one_is_worse(run_adapt, pair, tmp_path):
    done = run_adapt("--set", "steps=2", "--set", "learning_rate=0.5", drafter="unknown")
    assert done.exit_code == 3, done.output
    result = told(tmp_path / "run")
    assert result["after"] < result["before"]
    assert result["own_target"] is None
    assert result["drafter"] == str(pair / "unknown")
    assert f"{pair / 'unknown'} is kept, since the new one is worse" in done.stdout
    assert not (tmp_path / "run" / "drafter").exists()


def test_a_stopped_run_is_resumed_by_the_same_command(run_adapt, signalled, tmp_path):
    asked = ("--set", "steps=8", "--set", "learning_rate=0.01", "--set", "save_every=4")
    signalled(signal.SIGTERM)
    stopped = run_adapt(*asked, "--resume")
    assert stopped.exit_code == 143, stopped.output
    assert "stopped at step 4; the same command with --resume continues" in stopped.stderr
    begun = told(tmp_path / "run")
    assert begun["after"] is None
    resumed = run_adapt(*asked, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert run_adapt(*asked, out="whole").exit_code == 0
    once, twice = told(tmp_path / "whole"), told(tmp_path / "run")
    assert twice["before"] == begun["before"], "of the old drafter, not of the checkpoint"
    for name in ("before", "after", "own_target", "steps"):
        assert twice[name] == once[name], name
    again = run_adapt(*asked, "--resume")
    assert "is finished (see adapt.json)" in again.stderr
    (tmp_path / "run" / "adapt.json").write_text("{}")
    again = run_adapt(*asked, "--resume")
    assert f"domino train --out {tmp_path / 'run'} --resume" in again.stderr


def test_an_adapter_answers_prompts_or_makes_them_up(domino, target, draft, tmp_path, monkeypatch):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = tf.AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():  # never the mask token
        model.lm_head.weight.mul_(3)
        model.lm_head.weight[tiny.MASK] = 0
    model.save_pretrained(tmp_path / "base")
    tiny.make_tokenizer().save_pretrained(tmp_path / "base")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")

    def synthesise(_decoder, folder, _settings, *, count, **_more):
        """A random model seldom ends a prompt."""
        folder.mkdir(parents=True)
        lines = "".join(f"{tiny.LINES[n % 2]} {n}\n" for n in range(count))
        (folder / "prompts.txt").write_text(lines)

    monkeypatch.setattr(adapt_module, "synthesise", synthesise)
    asked = ("adapt", draft, "--target", tmp_path / "adapter", "--base", tmp_path / "base", *QUICK)
    asked += ("--limit", 24, "-n", 24, "--set", "steps=4", "--json")
    prompts = ("--prompts", tmp_path / "made-up" / "prompts" / "prompts.txt")
    for name, more in (("made-up", ()), ("asked", prompts)):
        done = domino(*asked, *more, "--out", tmp_path / name)
        assert done.exit_code in (0, 3), done.output
        assert told(tmp_path / name)["steps"] == 4
        assert json.loads(done.stdout.splitlines()[0])["data"]["conversations"] > 10
        settings = read_settings(tmp_path / name / "config.yaml")
        assert settings["data"] == [str(tmp_path / name / "answers")]
        assert settings["learning_rate"] == pytest.approx(1e-3 / 3)
        assert settings["init"] == draft
    parts = [tmp_path / name / "answers" / "part-00000.npz" for name in ("made-up", "asked")]
    assert parts[0].read_bytes() == parts[1].read_bytes(), "the same prompts, the same answers"


BACKBONE = {
    "hidden_size": SIZE, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 6, "vocab_size": SIZE, "num_target_layers": 2,
}  # fmt: skip
BLOCK = {
    **BACKBONE, "num_layers": 3, "target_layer_ids": (0, 1), "mask_token_id": 7, "block_size": 5,
}  # fmt: skip
DOMINO = DominoHeadConfig(gru_hidden_dim=12, emb_dim=6, pure_draft_prefix_len=2)
SHAPES = [
    DrafterConfig(**BLOCK, shift_label=True, head=DOMINO),
    DrafterConfig(**BLOCK, shift_label=True, head=MarkovHeadConfig(emb_dim=5)),
    DrafterConfig(**BLOCK, shift_label=False, draft_vocab_size=30),
    Eagle3Config(**BACKBONE, tapped_layers=(0, 1), unrolled=3, draft_vocab_size=20),
    MedusaConfig(hidden_size=SIZE, vocab_size=SIZE, num_target_layers=2, num_heads=3, num_layers=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["domino", "markov", "dflash", "eagle3", "medusa"])
def test_the_drafters_own_shape_is_trained(shape):
    target = bigram_target()
    settings = AdaptSettings(drafter="d", target="t", out="o")
    config = derive(train_config(settings, shape, {}), target)
    if isinstance(shape, DrafterConfig):
        assert config.mask_token_id == 7
        described = drafter_config(config, target, mask_token_id=config.mask_token_id)
    else:
        described = baseline_config(config, target)

    def trained(described):
        return {k: v for k, v in described.to_dict().items() if k not in _ITS_OWN}

    assert trained(described) == trained(shape)
    assert (config.max_seconds, config.epochs) == (60, 8)
    own = train_config(settings, shape, {"epochs": 2.0})
    assert (own.max_seconds, own.epochs, own.save_every) == (60, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{draft} --target {wide}", "the drafter does not fit .*: hidden size 32, expected 64"),
        ("lookup --target {target}", "'lookup' has no weights to adapt"),
        ("{draft} --target {target} --data {talks} --prompts {talks}", "were both given"),
        ("{draft} --target {target} --set layers=3", "layers cannot be set here"),
        ("{draft} --target {target} --set wings=3", "there is no setting wings"),
        ("{draft} --target {target} --base {wide}", "is no adapter: it has no adapter_config"),
    ],
)
def test_errors_come_before_weights_are_loaded(
    domino, target, wide_target, draft, talks, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.setattr(load_module.AutoModelForCausalLM, "from_pretrained", None)
    names = {"draft": draft, "target": target, "wide": wide_target, "talks": talks}
    parts = [part.format(**names) for part in arguments.split()]
    done = domino("adapt", *parts, "--out", tmp_path / "run")
    assert done.exit_code == 1, done.output
    assert re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run").exists()
