"""The scripts that make records run, on a tiny model, as they run on a real one."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as tf
import yaml
from benchmarks import (
    draft_costs,
    engine_crowd,
    long_context,
    memory,
    mutations,
    refit_output,
    sweep,
    sweep_sets,
    training_speed,
    tried,
)
from benchmarks.results_training import adapted

from domino_spec.checkpoints import load_drafter, save_drafter
from domino_spec.data import write_shard
from domino_spec.drafter import DraftModel
from domino_spec.drafters import open_drafter
from domino_spec.engine.cache import SlotCache
from domino_spec.evaluation import Protocol
from domino_spec.records import read_records
from domino_spec.targets import load_target
from domino_spec.training.config import BASELINES
from tests.cli.tiny import (
    LINES,
    MASK,
    VOCAB,
    drafter_config,
    make_tokenizer,
    save_draft,
    save_target,
)
from tests.support.families import random_prompts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = save_target(tmp_path_factory.mktemp("target"), tokenizer=make_tokenizer())
    # Text never holds the mask.
    prompts = [[t if t != MASK else 5 for t in p] for p in random_prompts([6] * 40, seed=1)]
    answers = [[t if t != MASK else 5 for t in p] for p in random_prompts([30] * 40, seed=2)]
    write_shard(folder / "s.npz", prompts=prompts, answers=answers, vocab_size=VOCAB)
    return folder


LOSSES = ("_likelihood", "_until_first_error")
NO_BLOCK = {"layers": None, "rank": None, "mask_token_id": None}


@pytest.mark.slow
def test_a_sweep_trains_measures_and_keeps(tiny, tmp_path, monkeypatch):
    base = {
        "batch_size": 2, "length": 64, "anchors": 4, "layers": 1, "rank": 4, "held_out": 2,
        "mask_token_id": MASK,
    }  # fmt: skip
    runs = [
        {"name": "a"},
        {"name": "b", "settings": {"variant": "dflash", "rank": None}, "seconds": 0.02},
        {"name": "c", "settings": {"gamma": -1.0}},
        *({"name": kind, "settings": {**NO_BLOCK, "variant": kind}} for kind in BASELINES),
        *({"name": idea, "tried": idea} for idea in tried._IDEAS),
        {"name": "d"},
    ]
    plan = {"base": base, "seconds": 0.01, "runs": runs}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    arguments = [
        "sweep", str(tmp_path / "plan.yaml"), "--target", str(tiny), "--data",
        str(tiny / "s.npz"), "--continuations", str(tmp_path / "answers"), "--out",
        str(tmp_path / "r.jsonl"), "--keep", str(tmp_path / "kept"), "--only", "a", "b", "c",
        *BASELINES, *tried._IDEAS,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    losses = {name: mock.Mock(wraps=getattr(tried, name)) for name in LOSSES}
    for name, spied in losses.items():
        monkeypatch.setattr(tried, name, spied)
    sweep.main()
    assert all(spied.called for spied in losses.values())
    first, second, failed, *others = read_records(tmp_path / "r.jsonl")
    kinds, ideas = others[: len(BASELINES)], others[len(BASELINES) :]
    assert [record["name"] for record in kinds] == list(BASELINES)
    for record in kinds:  # they decode, as nothing simulates them
        assert record["acceptance_length"]["held-out"]["on"] >= 1
        kept = tmp_path / "kept" / record["name"] / "drafter"
        opened = open_drafter(kept, load_target(tiny, device="cpu").target)
        assert (opened.kind, opened.parameters) == (record["name"], record["parameters"])
    assert [record["tried"] for record in ideas] == list(tried._IDEAS)
    assert all(record["acceptance_length"]["held-out"]["on"] >= 1 for record in ideas)
    parameters = {record["name"]: record["parameters"] for record in (first, *ideas)}
    assert parameters["convolution"] > parameters["a"] == parameters["lk"]
    assert (first["name"], first["seconds"], second["seconds"]) == ("a", 0.01, 0.02)
    assert set(first["acceptance_length"]["held-out"]) == {"on", "candidates", "off"}
    assert set(second["acceptance_length"]["held-out"]) == {"on"}
    assert first["steps"] > 0
    assert "gamma" in failed["failed"], "and the runs go on"
    assert (tmp_path / "kept" / "b" / "drafter" / "model.safetensors").is_file()


@pytest.mark.parametrize("idea", ["lk", "auf"])
def test_gradients_of_losses_that_were_tried(idea):
    draw = torch.Generator().manual_seed(0)
    base, added, teacher = torch.randn(3, 12, 7, generator=draw, dtype=torch.float64).unbind()
    best, weights = teacher.argmax(-1), torch.rand(12, generator=draw, dtype=torch.float64)
    drafts, lam = torch.arange(12) % 4, torch.tensor(0.3, dtype=torch.float64)
    corrected = (drafts >= 1).unsqueeze(1)
    base, added = base.requires_grad_(), added.requires_grad_()
    truth = teacher.softmax(-1)
    log_base, log_final = base.log_softmax(-1), (base + added * corrected).log_softmax(-1)
    loss_base, loss_final = -(truth * log_base).sum(-1), -(truth * log_final).sum(-1)
    if idea == "lk":
        distance = 0.5 * (log_final.exp() - truth).abs().sum(-1)
        share = 1 - torch.exp(-tried._DECAY * (1 - distance.detach()))
        loss = lam * loss_base + (1 - lam) * ((1 - share) * loss_final + share * distance)
        found = tried._likelihood(
            base.detach(), added.detach(), teacher, best, drafts >= 1, weights, lam, None, 1.0, None
        )
    else:
        right = (base.argmax(-1) == best).view(-1, 4).long()
        before = torch.cat((torch.ones(3, 1), right[:, :-1].cumprod(1)), dim=1).flatten()
        loss = lam * before * loss_base + (1 - lam) * loss_final
        found = tried._until_first_error(
            base.detach(), added.detach(), teacher, best, drafts, weights, lam, None, 1.0, None
        )
    wanted = torch.autograd.grad((weights * loss).sum(), (base, added))
    torch.testing.assert_close(found[0].double(), weights * loss, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(found[3:], wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_fine_tune_is_made_compared_adapted_to_and_measured(tmp_path, monkeypatch):
    from benchmarks import adapt  # and peft, which takes seconds

    base = save_target(tmp_path / "base", tokenizer=make_tokenizer())
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():  # its answers never hold the mask token
        model.lm_head.weight.mul_(3)
        model.lm_head.weight[MASK] = 0
    model.config.max_position_embeddings = 72  # short answers
    model.save_pretrained(base)
    monkeypatch.setattr(adapt, "RATE", 0.05)
    for module in (adapt, sweep, sweep_sets):
        monkeypatch.setattr(module, "Protocol", partial(Protocol, max_new_tokens=33))
    save_drafter(DraftModel.fresh(drafter_config(), seed=0), tmp_path / "draft")
    lines = [(f"{LINES[n % 2]} {n}", f"{n} {LINES[0]}") for n in range(40)]
    roles = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in lines
    ]
    rows = [json.dumps({"messages": messages}) for messages in roles]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    (tmp_path / "asked.txt").write_text("\n".join(asked for asked, _ in lines))
    (tmp_path / "set.jsonl").write_text('{"turns": ["what is the quick answer"]}')
    file = tmp_path / "adapt.jsonl"
    words = [
        base, tmp_path / "draft", "--run", tmp_path / "run", "--data", tmp_path / "talks.jsonl",
        "--sets", tmp_path / "set.jsonl", "--limit", 4, "--steps", 4, "--batch", 4, "--length", 64,
        "--texts", 2, "--text-tokens", 8, "--answers", 20, "--answer-tokens", 16, "--prompts",
        tmp_path / "asked.txt", "--seconds", 0.05, "--full-seconds", 0.05, "--records",
        file, "--set", "length=64", "batch_size=2", "anchors=4", "eval_tokens=12",
    ]  # fmt: skip
    adapt.main([str(word) for word in words])
    records = {record["stage"]: record for record in read_records(file)}
    first, last = records["fine-tune"]["loss"]
    assert last < first
    assert records["texts"]["weights_equal"]
    assert records["texts"]["as_adapter"] == {"merged": 2, "base": 0}
    assert records["domino adapt"]["before"] >= 1
    assert records["domino adapt"]["steps"] > 0
    assert "init" not in records["domino adapt"]["settings"]
    assert records["domino train"]["settings"]["layers"] == 2
    measured = [record for record in records.values() if "acceptance_length" in record]
    assert len(measured) == 4
    for record in measured:
        assert set(record["acceptance_length"]) == {"set", "held-out", "fine-tune"}
        answers = record["answers"]["held-out"].values()
        assert sum(answers) == 2, "as many as training holds out"
    text = adapted(file)
    assert "the same greedy text for 2 of 2 prompts" in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 6
    monkeypatch.setattr(adapt, "load_target", None)
    adapt.main([str(word) for word in words])
    assert len(read_records(file)) == len(records), "all is done"


def test_docstrings_become_conversations(tmp_path):
    said = "Return the things, each of them once, in the order in which they were met." * 3
    (tmp_path / "tests").mkdir()
    for name in ("things.py", "tests/more.py"):
        code = f'class A:\n  def f(self, n=1):\n    """{said}"""\ndef g():\n  """Too short."""\n'
        (tmp_path / name).write_text(code)
    asked = "What is `f(self, n=1)` of Python's module `things`?"
    from benchmarks import adapt

    assert list(adapt.docstrings(tmp_path)) == [(asked, said)]


def test_training_speed_leaves_a_record(tmp_path, monkeypatch):
    arguments = [
        "training_speed", "tiny", "--steps", "8", "--out", str(tmp_path / "r.jsonl"), "--set",
        "rows=2", "length=64", "anchors=4", "layers=1", "rank=4",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    training_speed.main()
    (record,) = read_records(tmp_path / "r.jsonl")
    assert record["tera_operations_per_step"] > 0
    assert sum(record["stage_share"].values()) == pytest.approx(1, abs=0.01)
    assert record["conversations_per_second"] > 0


def test_an_output_weight_is_fitted_again(tiny, tmp_path, monkeypatch):
    """From a head whose output is zero to one that names more of the target's tokens."""
    config = replace(drafter_config(), block_size=8)
    save_drafter(DraftModel.fresh(config, seed=0), tmp_path / "bare")
    monkeypatch.setattr(refit_output, "LENGTH", 64)
    monkeypatch.setattr(refit_output, "ANCHORS", 8)
    arguments = [
        "refit", str(tmp_path / "bare"), str(tmp_path / "fitted"), "--target", str(tiny), "--data",
        str(tiny / "s.npz"), "--labels", "400", "--epochs", "2", "--batch", "64",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    refit_output.main()
    before, after = (load_drafter(tmp_path / name).drafter for name in ("bare", "fitted"))
    assert not before.head.output_weight.any()
    assert after.head.output_weight.any()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if "embed_proj.2" not in name:
            assert torch.equal(old.bfloat16(), new.bfloat16()), name


@pytest.fixture
def stress(tmp_path, monkeypatch):
    """The script with one small stress test of a kind, and its records."""
    out = tmp_path / "crowd.jsonl"

    def ask(*kinds):
        arguments = ["--crowds", "1", "--turns", "45", "--out", str(out), "--drafters", *kinds]
        monkeypatch.setattr(sys, "argv", ["stress", *arguments])
        return out

    return ask


def test_a_stress_test_gives_each_sequence_what_it_gets_alone(stress):
    kinds = ["domino", "lookup"]
    out = stress(*kinds)
    engine_crowd.main()
    records = read_records(out)
    assert [record["drafter"] for record in records] == kinds
    bounds = {"domino": (2, 8), "lookup": (1.1, 3.9)}
    for record in records:
        assert record["differing_crowds"] == 0
        assert record["rows"] > record["left_early"] > 0
        assert record["began_behind_others"] > 2
        low, high = bounds[record["drafter"]]  # drafts are accepted, and refused
        assert low < record["tokens_per_cycle"] < high


def test_a_stress_test_that_differs_is_reported(stress, monkeypatch):
    out = stress("domino")
    monkeypatch.setattr(SlotCache, "copy", lambda *_: None)  # reused tokens that are not there
    with pytest.raises(SystemExit, match="1 stress tests differ"):
        engine_crowd.main()
    assert read_records(out)[0]["differing_crowds"] == 1


def test_the_peak_of_a_command_is_that_of_its_own_process(tmp_path):
    assert 10e6 < memory.peak_bytes(["--version"], cache=tmp_path) < 200e6
    with pytest.raises(RuntimeError, match="typer"):
        memory.peak_bytes(["--version"], without=["typer"], cache=tmp_path)


def test_costs_are_timed_for_every_depth_and_drafts_without_cost(tiny):
    target = load_target(tiny, device="cpu").target
    drafter = open_drafter(DraftModel.untrained(drafter_config()), target)
    found = draft_costs.costs(target, drafter, [0, 1, 2], context=8, rounds=2)
    kinds = [f"{kind} {depth}" for depth in (0, 1, 2) for kind in ("forward", "free", "cycle")]
    assert list(found["costs"]) == ["plain", *kinds]
    assert all(cost["seconds"] > 0 for cost in found["costs"].values())
    assert {"draft backbone", "verify"} <= set(found["parts"][2])


def test_answers_behind_long_texts_are_compared_after_the_same_prefill(tiny, tmp_path, monkeypatch):
    """Neither engine takes over more of a prompt than the other; a second run goes on."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"turns": [line]}) + "\n" for line in LINES))
    arguments = [
        "long", str(tiny), "--draft", str(save_draft(tmp_path / "draft")), "--questions",
        str(asked), "--context", "60", "0", "--max-new-tokens", "12", "--threads", "1",
        "--drafts", "all", "--out", str(tmp_path / "r.jsonl"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(long_context, "is_loop", lambda _: False)
    monkeypatch.setattr(long_context, "SHORTEST", 12)
    made = mock.Mock(wraps=long_context.Engine)
    monkeypatch.setattr(long_context, "Engine", made)
    for _ in range(2):
        long_context.main()
    assert made.call_count == 2
    plain, drafting = made.call_args_list
    assert len(plain.args) == 1
    assert len(drafting.args) == 2
    records = read_records(tmp_path / "r.jsonl")
    assert [(r["context"], r["adaptive"]) for r in records] == [(60, False), (0, False)]
    for record in records:
        reused = record["per_prompt"]["reused"]
        assert all(ours == plain > record["context"] // 2 for plain, ours in reused)
        assert record["same_text"] == record["used"] == len(LINES)
    monkeypatch.setattr(sys, "argv", [*arguments, "--max-new-tokens", "8"])
    with pytest.raises(SystemExit, match="answers count from 12 on"):
        long_context.main()


def test_every_fault_can_be_put_in():
    """Its line stands once in the code as it is."""
    assert len({each.name for each in mutations.MUTATIONS}) == len(mutations.MUTATIONS)
    for each in mutations.MUTATIONS:
        assert each.file(mutations.ROOT).is_file()
        assert each.old != each.new
