"""The feed, the start of a run, what a run is given besides its settings."""

import threading
from importlib import import_module

import pytest
import torch

from domino_spec.drafter import DraftModel
from domino_spec.errors import TrainingError
from domino_spec.targets import LoadedTarget, read
from domino_spec.training import train
from domino_spec.training.blocks import Feed
from domino_spec.training.start import fit_to_sizes, measure_sizes, weight_scales
from domino_spec.training.trainer import Intervals
from tests.support.families import drafter_config, make_target
from tests.support.pair import MASK, SIZE
from tests.training.helpers import Reports, assert_same, ready, state_of


def feed_of(run, plan=None, **changes):
    options = {"first_step": 0, "last_step": 5, "parts": 2, "seed": 0, "pin": False, **changes}
    return Feed(run.trainer._batches, plan or run.trainer._plan, **options)


def feeding():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_a_feed_gives_every_step_with_its_position(tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded)
    works = list(feed_of(run))
    assert len(works) == 5
    positions = [(work.position["epoch"], work.position["row"]) for work in works]
    assert positions == sorted(set(positions)), "each step ends further on"
    assert positions[0] == (0, 4), "two parts of two sequences"


def test_an_error_while_feeding_ends_the_run(tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded, log_every=1)
    plan, calls = run.trainer._plan, []

    def fails(batch, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("bad batch")
        return plan(batch, **options)

    run.trainer._plan = fails
    with pytest.raises(RuntimeError, match="bad batch"):
        train(run)
    assert run.trainer.step == 2


def test_a_feed_that_is_closed_stops_working(tmp_path, corpus, loaded):
    feed = feed_of(ready(tmp_path, corpus, loaded), last_step=10_000)
    next(iter(feed))
    feed.close()
    for thread in feeding():
        thread.join(timeout=5)
    assert not feeding()


def test_a_run_outside_the_main_thread(tmp_path, corpus, loaded):
    """Signals never arrive there; it trains the same."""
    runs = [ready(tmp_path / name, corpus, loaded, steps=3) for name in ("here", "there")]
    train(runs[0])
    thread = threading.Thread(target=train, args=(runs[1],))
    thread.start()
    thread.join()
    assert_same(state_of(runs[1]), state_of(runs[0]))


def test_a_fresh_drafter_fits_the_sizes_of_the_targets_states(corpus):
    """What it reads becomes about one, and its first logits are small."""

    class Two:
        """Conversations whose tokens a model of this vocabulary knows."""

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return corpus[index]

    target = make_target("gemma2")
    drafter = DraftModel.fresh(drafter_config(), seed=0)
    with torch.no_grad():  # of no even size
        target.embedding.weight.mul_(torch.logspace(-2, 2, target.hidden_size).unsqueeze(0))
        target.lm_head.weight.copy_(target.embedding.weight)  # which makes the mask loud
    before = {name: weight.clone() for name, weight in drafter.named_parameters()}
    sizes = measure_sizes(drafter, target, Two())
    fit_to_sizes(drafter, target, sizes)
    tokens = [torch.from_numpy(corpus[i].tokens).long().unsqueeze(0) for i in range(2)]
    readings = [read(target, t, capture_layers=drafter.capture_layers) for t in tokens]
    read_by = {
        "backbone.fc.weight": [reading.captured[0] for reading in readings],
        "head.prefix_gru.weight_ih_l0": [target.embed(t)[0] for t in tokens],
        "head.embed_proj.0.weight": [reading.hidden[0] for reading in readings],
    }
    assert set(drafter.reads) == set(read_by)
    scales = weight_scales(drafter, sizes)
    for name, states in read_by.items():
        size = torch.cat(states).abs().mean(0)
        layers = size.view(-1, target.hidden_size)
        loud = (layers > layers.mean(1, keepdim=True) / 2).flatten()
        factor = (drafter.get_parameter(name) / before[name]).detach()[:, : len(size)]
        seen = factor * size
        assert bool((seen <= 2**0.51).all())
        assert bool((seen[:, loud] >= 2**-0.51).all()), "within a power of two"
        quiet = layers.mean(1, keepdim=True).expand_as(layers).flatten() * factor
        assert bool((quiet <= 2**3).all()), "a silent channel gets no enormous steps"
        own = before[name][:, len(size) :]  # a head's state, which is its own
        assert drafter.get_parameter(name)[:, len(size) :].equal(own)
        assert (drafter.get_parameter(name) * scales[name]).equal(before[name]), "exactly"
    master = drafter.backbone.norm.weight.detach() * scales["backbone.norm.weight"]
    assert bool((master == master[0]).all()), "all channels alike"
    assert 0 < float(master[0]) <= 0.1001
    mask = target.embed(torch.tensor([drafter.config.mask_token_id]))
    logits = target.logits(drafter.backbone.norm(mask))
    assert float(logits.detach().abs().max()) <= 1.001, "it is not certain of the mask"


def test_nothing_held_out_is_nothing_evaluated(tmp_path, corpus, loaded):
    reports = Reports()
    run = ready(tmp_path, corpus, loaded, reports, held_out=0, eval_every=1, steps=2)
    assert run.evaluate is None
    train(run)
    assert not reports.evaluated


def test_a_tenth_of_the_run_unless_told_otherwise(tmp_path, corpus, loaded):
    reports = Reports()
    run = ready(
        tmp_path, corpus, loaded, reports, steps=23, log_every=50, eval_every=None, save_every=None
    )
    run.trainer._evaluate = lambda: {"tokens_per_cycle": 1.0}
    train(run)
    tenths = [3, 5, 7, 10, 12, 14, 17, 19, 21, 23]
    assert [step for step, _ in reports.evaluated] == tenths
    assert [step for step, _ in reports.trained] == tenths, "before each checkpoint"
    intervals = Intervals(log=4, evaluate=0, save=None)
    assert not intervals.due(0, 50, 50, tenth=True)
    assert intervals.due(7, 50, 50, tenth=False)


def test_the_mask_is_chosen_among_tokens_that_prompts_do_not_hold_either(
    tmp_path, corpus, loaded, monkeypatch
):
    """Role marks stand in prompts alone; a template may put them together unseen."""
    seen = []

    def chosen(_target, _tokenizer, counts):
        seen.append(counts)
        return MASK

    monkeypatch.setattr(import_module("domino_spec.training.start"), "choose_mask_token", chosen)
    run = ready(tmp_path, corpus, loaded, mask_token_id=None)
    training = run.trainer._batches.corpus
    assert seen[0].sum() == training.lengths.sum() > training.token_counts(SIZE).sum()


def test_a_mask_that_the_data_hold_is_refused(tmp_path, corpus, loaded):
    common = int(corpus[0].tokens[0])
    with pytest.raises(TrainingError, match=f"mask_token_id is {common}, which the data hold"):
        ready(tmp_path, corpus, loaded, mask_token_id=common)


def test_a_hybrid_target_is_read_document_by_document(tmp_path, corpus):
    reports = Reports()
    target = make_target("qwen3_5_text")
    changes = {"steps": 2, "log_every": 1, "eval_every": 2, "target_layer_ids": [0, 2]}
    run = ready(tmp_path, corpus, LoadedTarget.of(target), reports, **changes)
    assert "state no mask resets between the documents" in target.packing_refusal
    train(run)
    assert len(reports.trained) == 2
    assert len(reports.evaluated) == 1
