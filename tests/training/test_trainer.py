"""Runs on a target that is a bigram table: what is learnt, saved and drawn."""

import math

import pytest
import torch

from domino_spec import DominoDecoder
from domino_spec.checkpoints import load_drafter, save_drafter, save_packed
from domino_spec.data import load_corpus, write_shard
from domino_spec.errors import ConfigError, DataError, TrainingError
from domino_spec.evaluation import continue_prompts, simulate
from domino_spec.targets import LoadedTarget, read
from domino_spec.training import prepare, train
from domino_spec.training.blocks import Feed, step_noise
from domino_spec.training.loss import Mixture
from tests.support.families import VOCAB, make_target
from tests.support.pair import SIZE
from tests.support.tokens import small_tokenizer
from tests.training.helpers import (
    ALONE,
    Reports,
    assert_same,
    bigram_config,
    ready,
    state_of,
    weights_of,
)

QUICK = {"steps": 3, "save_every": 0, "log_every": 1}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory, corpus, loaded):
    """A run long enough to learn something."""
    reports = Reports()
    run = ready(
        tmp_path_factory.mktemp("learnt") / "run", corpus, loaded, reports,
        steps=60, learning_rate=1e-2, eval_every=20, log_every=10, save_every=0,
    )  # fmt: skip
    before = run.evaluate()
    outcome, folder = train(run)
    return run, reports, before, outcome, folder


def test_the_loss_falls_and_tokens_a_cycle_rise(learnt):
    _, reports, before, outcome, _ = learnt
    losses = [values["loss"] for _, values in reports.trained]
    uniform = math.log(SIZE)
    assert losses[0] < uniform, "no worse than guessing from the first steps on"
    assert losses[-1] < 0.6 * uniform
    accuracy = [values["accuracy"] for _, values in reports.trained]
    assert accuracy[-1][0] > 0.95
    assert sum(accuracy[-1]) > sum(accuracy[0]) + 1
    found = [values["tokens_per_cycle"] for _, values in reports.evaluated]
    assert [step for step, _ in reports.evaluated] == [20, 40, 60]
    assert before["tokens_per_cycle"] < 2.0 < 3.5 < found[-1]
    assert found[-1] >= found[0]
    assert outcome.finished
    assert outcome.step == 60
    assert outcome.signal is None


def test_the_saved_drafter_decodes_as_the_simulation_said(learnt, loaded):
    """Training, simulation and serving share one forward (mistake 10)."""
    run, reports, _, _, folder = learnt
    checkpoint = load_drafter(folder)
    assert checkpoint.config == run.drafter.config
    saved = dict(checkpoint.drafter.named_parameters())
    for name, weight in weights_of(run).items():
        assert saved[name].equal(weight), name
    held_out = run.corpus.split(held_out=8, seed=0)[1]
    prompts = [held_out[i].tokens[: held_out.first_supervised(i)].tolist() for i in range(4)]
    depth = checkpoint.config.default_depth  # as the simulation: the engine would adapt it
    decoder = DominoDecoder(loaded.target, checkpoint.drafter, depth=depth)
    answers = [decoder.generate(prompt, max_new_tokens=20) for prompt in prompts]
    made = continue_prompts(loaded.target, prompts, eos=(), max_new_tokens=20, batch_size=1)
    assert [tuple(a.tokens) for a in answers] == list(made.answers)
    committed = sum(len(a.tokens) - 1 for a in answers)
    cycles = sum(a.stats.cycles for a in answers)
    assert reports.evaluated[-1][1]["tokens_per_cycle"] == pytest.approx(committed / cycles)
    simulated = simulate(checkpoint.drafter, loaded.target, made)
    assert simulated.tokens_per_cycle == pytest.approx(committed / cycles)


def test_what_a_run_reports(learnt):
    _, reports, _, outcome, _ = learnt
    assert [step for step, _ in reports.trained] == [10, 20, 30, 40, 50, 60]
    first, last = reports.trained[0][1], reports.trained[-1][1]
    assert first["lambda"] == last["lambda"] == 0.3
    assert len(first["accuracy"]) == len(first["base_accuracy"]) == 6
    assert first["epoch"] < last["epoch"]
    assert min(last["conversations_per_second"], last["seconds_per_step"], last["grad_norm"]) > 0
    assert outcome.last["tokens_per_cycle"] == reports.evaluated[-1][1]["tokens_per_cycle"]


VARIANTS = {
    "domino": {},
    "dflash": {"variant": "dflash"},
    "markov": {"variant": "markov"},
    "hard labels": {"labels": "hard"},
    "sharper labels": {"sharpness": 2.0},
    "total variation": {"tv_weight": 0.9, "tv_start": 0.0},
    "reduced vocabulary": {"draft_vocab": 30},
    "reduced vocabulary, hard": {"draft_vocab": 30, "labels": "hard"},
    "no shift": {"shift_label": False},
    "the paper's curriculum": {"curriculum_ratio": 1.0, "base_weight": 0.0},
    "no pure prefix": {"prefix_len": 0},
    "adamw": {"optimizer": "adamw"},
    "half precision": {"dtype": "bfloat16"},
    "several forwards a step": {"accumulate": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_learn(variant, tmp_path, corpus, loaded):
    reports = Reports()
    options = {**QUICK, "steps": 8, "learning_rate": 1e-2, **VARIANTS[variant]}
    run = ready(tmp_path, corpus, loaded, reports, **options)
    before = weights_of(run)
    outcome, folder = train(run)
    assert outcome.finished
    losses = [values["loss"] for _, values in reports.trained]
    assert all(loss == loss for loss in losses)
    if variant != "total variation":  # the loss itself changes on the way
        assert losses[-1] < losses[0]
    # A head's states are learnt once its zero output weight has moved.
    for name, weight in weights_of(run).items():
        assert not weight.equal(before[name]), f"{name} is not learnt"
    reloaded = load_drafter(folder).drafter
    assert reloaded.config == run.drafter.config
    if "draft_vocab" in options:
        assert reloaded.draft_tokens.equal(run.drafter.draft_tokens)
        assert len(reloaded.draft_tokens) == 30 < SIZE


def test_lambda_is_in_the_loss(tmp_path, corpus, loaded):
    """At λ = 1 the head learns nothing yet; without a curriculum it does from the first step."""
    for ratio in (1.0, 0.0):
        run = ready(
            tmp_path / str(ratio), corpus, loaded, **{**QUICK, "steps": 1},
            curriculum_ratio=ratio,
        )  # fmt: skip
        before = weights_of(run)["head.embed_proj.2.weight"]
        train(run)
        moved = not weights_of(run)["head.embed_proj.2.weight"].equal(before)
        assert moved is (ratio == 0.0)


def test_one_seed_is_one_run_and_another_is_another(tmp_path, corpus, loaded):
    runs = []
    for index, seed in enumerate((0, 0, 1)):
        reports = Reports()
        run = ready(tmp_path / str(index), corpus, loaded, reports, seed=seed, **QUICK)
        torch.manual_seed(index)  # must not matter
        torch.rand(index + 1)
        train(run)
        runs.append((state_of(run), [values["loss"] for _, values in reports.trained]))
    assert_same(runs[0], runs[1])
    assert runs[0][1] != runs[2][1]
    weights = runs[0][0]["weights"], runs[2][0]["weights"]
    assert not weights[0]["backbone.fc.weight"].equal(weights[1]["backbone.fc.weight"])


def test_accumulated_forwards_are_one_larger_step(tmp_path, corpus, loaded):
    """Rows come in order and anchors are drawn for the step: 2 x 2 rows are 4 rows."""
    found = []
    for index, shape in enumerate(
        (
            {"batch_size": 4},
            {"batch_size": 2, "accumulate": 2},
            {"batch_size": 1, "accumulate": 4},
            {"batch_size": 2},
        )
    ):
        reports = Reports()
        options = {**QUICK, "steps": 4, "optimizer": "adamw", **shape}  # Muon rounds to bfloat16
        run = ready(tmp_path / str(index), corpus, loaded, reports, **options)
        train(run)
        losses = torch.tensor([values["loss"] for _, values in reports.trained])
        masters = run.trainer.masters
        weights = (parameter.detach() for parameter in masters.parameters)
        found.append((losses, dict(zip(masters.names, weights, strict=True))))
    whole = found[0]
    for losses, weights in found[1:3]:
        torch.testing.assert_close(losses, whole[0], atol=1e-5, rtol=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[1][name], atol=2e-4, rtol=1e-3, msg=name)
    assert (found[3][0] - whole[0]).abs().max() > 1e-3, "the test is blind"


def test_the_loop_is_the_textbooks(tmp_path, corpus, loaded):
    """Steps written out: gradients of one step alone, cut, one AdamW step at its rate."""
    options = {
        **QUICK, "clip": 0.03, "weight_decay": 0.01, "steps": 4, "warmup_ratio": 0.5,
        "optimizer": "adamw", "curriculum_ratio": 1.0, "base_weight": 0.0,
    }  # fmt: skip
    reports = Reports()
    run = ready(tmp_path / "run", corpus, loaded, reports, **options)
    train(run)
    fresh = ready(tmp_path / "fresh", corpus, loaded, **options)
    trainer, target = fresh.trainer, loaded.target
    masters = trainer.masters
    parameters = masters.parameters
    vectors = [p for p in parameters if p.dim() == 1]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    feed = Feed(
        trainer._batches, trainer._plan, first_step=0, last_step=4, parts=1, seed=0, pin=False
    )  # fmt: skip
    losses, norms = [], []
    for step, work in enumerate(feed):
        (blocks,) = work.parts
        reading = read(
            target, blocks.tokens, capture_layers=fresh.drafter.config.target_layer_ids,
            positions=blocks.positions, documents=blocks.documents,
        )  # fmt: skip
        mixture = Mixture.of(base=1 - step / 4, variation=0.0, device=torch.device("cpu"))
        weight = blocks.weights.sum()
        terms = trainer.objective(target, reading, blocks, mixture=mixture, total_weight=weight)
        gradients = [
            gradient if scale is None else gradient / scale
            for gradient, scale in zip(
                torch.autograd.grad(terms.loss, masters.model), masters._scales, strict=True
            )
        ]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * min(1.0, 0.03 / float(norm))
        rate = trainer.schedule.rate(step)
        optimiser.param_groups[0]["lr"], optimiser.param_groups[1]["lr"] = rate, 10 * rate
        optimiser.step()
        masters.give_weights()
        losses.append(float(terms.loss.detach()))
        norms.append(float(norm))
    assert min(norms) > 0.03, "the cut does something"
    assert [values["loss"] for _, values in reports.trained] == pytest.approx(losses, rel=1e-5)
    assert [values["grad_norm"] for _, values in reports.trained] == pytest.approx(norms, rel=1e-4)
    for name, weight in weights_of(run).items():
        torch.testing.assert_close(weight, weights_of(fresh)[name], atol=1e-5, rtol=1e-4, msg=name)


def test_noise_follows_from_seed_and_step_alone():
    torch.manual_seed(3)
    draws = {(seed, step): step_noise(seed, step, (4, 50)) for seed in (0, 1, 7) for step in (0, 1)}
    torch.manual_seed(4)
    for (seed, step), noise in draws.items():
        assert step_noise(seed, step, (4, 50)).equal(noise)
        others = [other for key, other in draws.items() if key != (seed, step)]
        assert not any((noise == other).any() for other in others)
        assert 0 <= noise.min() < 0.1
        assert 0.9 < noise.max() < 1


def test_total_steps_follow_from_epochs(tmp_path, corpus, loaded):
    for epochs, accumulate in ((1, 1), (2.5, 1), (2, 3)):
        run = ready(
            tmp_path / f"{epochs}-{accumulate}", corpus, loaded, steps=None, epochs=epochs,
            accumulate=accumulate,
        )  # fmt: skip
        batches = run.trainer._batches.batches_per_epoch
        assert batches > 5
        assert run.config.steps == run.trainer.schedule.total_steps
        assert run.config.steps == -(-epochs * batches // accumulate)
        assert run.config.epochs is None
    run = ready(tmp_path / "default", corpus, loaded, steps=None)
    assert run.config.steps == 3 * batches, "three epochs unless told otherwise"


def test_every_conversation_but_those_held_out_is_learnt(tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded, held_out=8)
    training = run.trainer._batches.corpus
    assert len(training) == len(corpus) - 8
    assert corpus.split(held_out=8, seed=0)[0].fingerprint == training.fingerprint


def test_a_warm_start_takes_the_weights_along(learnt, tmp_path, corpus, loaded):
    run, reports, _, _, folder = learnt
    again = Reports()
    warm = ready(tmp_path / "warm", corpus, loaded, again, init=str(folder), **QUICK)
    assert_same(weights_of(warm), weights_of(run))
    train(warm)
    assert again.trained[0][1]["loss"] < 1.3 * reports.trained[-1][1]["loss"]
    assert not weights_of(warm)["backbone.fc.weight"].equal(weights_of(run)["backbone.fc.weight"])


def test_a_warm_start_keeps_its_window_unless_told_otherwise(learnt, tmp_path, corpus, loaded):
    run, *_, folder = learnt
    assert run.config.sliding_window == run.drafter.config.sliding_window == 32, "half of 64"
    for wanted, found in ((None, 32), (16, 16), (0, None)):
        options = {"init": str(folder), "sliding_window": wanted, **QUICK}
        warm = ready(tmp_path / str(found), corpus, loaded, **options)
        assert warm.config.sliding_window == (found or 0)
        assert warm.drafter.config.sliding_window == found
        kind = "sliding_attention" if found else "full_attention"
        assert set(warm.drafter.config.layer_types) == {kind}
        assert_same(weights_of(warm), weights_of(run))


def test_a_warm_start_may_draft_blocks_of_another_size(learnt, tmp_path, corpus, loaded):
    run, *_, folder = learnt
    warm = ready(tmp_path / "warm", corpus, loaded, init=str(folder), block_size=4, **QUICK)
    assert (run.drafter.config.block_size, warm.drafter.config.block_size) == (6, 4)
    assert_same(weights_of(warm), weights_of(run))
    _, shorter = train(warm)
    assert load_drafter(shorter).drafter.config.block_size == 4


def test_a_packed_drafter_decodes_as_it_was_trained(tmp_path, corpus, loaded):
    run = ready(tmp_path / "run", corpus, loaded, pack=6, **{**QUICK, "steps": 4})
    _, folder = train(run)
    assert run.trainer.masters.packing, "its last steps were with rounded weights"
    trained = load_drafter(folder, dtype=torch.float32).drafter
    packed = load_drafter(save_packed(trained, tmp_path / "packed", bits=6), dtype=torch.float32)
    for name, weight in weights_of(run).items():
        kept = trained.get_parameter(name)
        assert torch.allclose(packed.drafter.get_parameter(name), kept, rtol=2**-7, atol=0), name
        if weight.dim() == 2:
            assert not torch.allclose(kept, weight, rtol=2**-7, atol=0), "the test is not blind"


def test_a_warm_start_from_a_reduced_vocabulary_keeps_its_tokens(tmp_path, corpus, loaded):
    run = ready(tmp_path / "first", corpus, loaded, draft_vocab=30, **QUICK)
    folder = save_drafter(run.drafter, tmp_path / "drafter")
    warm = ready(tmp_path / "warm", corpus, loaded, draft_vocab=30, init=str(folder), **QUICK)
    assert warm.drafter.draft_tokens.equal(run.drafter.draft_tokens)
    assert train(warm)[0].finished


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 6}, "head.*emb_dim"),
        ({"layers": 2}, "num_layers 1 against 2"),
        ({"shift_label": False}, "shift_label True against False"),
        ({"variant": "dflash"}, "head"),
    ],
)
def test_a_warm_start_from_another_drafter_is_refused(
    learnt, tmp_path, corpus, loaded, changes, words
):
    with pytest.raises(TrainingError, match=words):
        ready(tmp_path, corpus, loaded, init=str(learnt[4]), **changes)


def test_the_target_is_left_alone(learnt, loaded):
    assert not any(p.requires_grad for p in loaded.target.model.parameters())
    assert all(p.grad is None for p in loaded.target.model.parameters())


def test_without_a_tokenizer_a_mask_must_be_named(tmp_path, corpus, loaded):
    with pytest.raises(ConfigError, match="mask_token_id"):
        ready(tmp_path, corpus, loaded, mask_token_id=None)


def test_a_batch_without_labels_does_not_end_the_run(tmp_path, loaded):
    """One answer token a row: no block fits, nothing is learnt, the rest goes on."""
    path = tmp_path / "short.npz"
    prompts, answers = [[1] * 9] * 30 + [[2] * 4] * 30, [[3]] * 30 + [[4, 5, 6, 7, 8]] * 30
    write_shard(path, prompts=prompts, answers=answers, vocab_size=SIZE)
    corpus = load_corpus([str(path)], tokenizer=None, vocab_size=SIZE)
    run = ready(tmp_path / "run", corpus, loaded, batch_size=1, length=10, steps=20)
    outcome, _ = train(run)
    assert outcome.finished


def test_columns_may_be_called_otherwise(tmp_path):
    """What `data check` reads with its flags, training reads with its settings."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"body": "the quick brown fox"}\n' * 30, encoding="utf-8")
    target = LoadedTarget(
        target=make_target("llama"), tokenizer=small_tokenizer(), source="llama", revision=None
    )
    own = {"data": [str(path)], "steps": 1, "mask_token_id": VOCAB - 1}
    config = bigram_config(tmp_path / "run", text_field="body", **own)
    assert prepare(config, world=ALONE, loaded=target).corpus.report.conversations > 0
    with pytest.raises(DataError):
        prepare(bigram_config(tmp_path / "other", **own), world=ALONE, loaded=target)
