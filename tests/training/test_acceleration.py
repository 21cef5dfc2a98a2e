"""The compiled path does what the plain one does; here Dynamo traces it and no kernel is made."""

from collections import Counter

import pytest
import torch

from domino_spec.training import acceleration, train
from tests.support.families import drafter_config, make_target, random_drafter
from tests.training.helpers import assert_same, ready, weights_of


@pytest.fixture
def traced(monkeypatch):
    """Counts calls of compiled forms; their graphs run as they are, a C++ compiler takes long."""
    calls = Counter()

    def trace(function):
        form = torch.compile(function, dynamic=False, backend="eager")

        def counted(*arguments, **options):
            calls[function.__qualname__] += 1
            return form(*arguments, **options)

        return counted

    monkeypatch.setattr(acceleration, "_compiled", trace)
    yield calls
    torch._dynamo.reset()


def test_a_compiled_run_learns_the_same(traced, tmp_path, corpus, loaded):
    plain = ready(tmp_path / "plain", corpus, loaded, steps=3)
    train(plain)
    assert not traced
    quick = ready(
        tmp_path / "quick", corpus, loaded, steps=3, compile="on", eval_every=2, eval_tokens=6
    )
    outcome, _ = train(quick)
    assert_same(weights_of(plain), weights_of(quick))
    assert outcome.last["tokens_per_cycle"] >= 1
    layers = len(quick.drafter.backbone.layers)
    # Three steps and nothing else: evaluation in between runs on the plain forms.
    assert traced["DraftLayer.forward"] == 3 * layers
    assert traced["LlamaDecoderLayer.forward"] == 3 * loaded.target.num_layers
    assert traced["chunk_gradients"] >= 3


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_compiled_baselines_learn_the_same(traced, tmp_path, corpus, loaded, kind):
    runs = [
        ready(tmp_path / mode, corpus, loaded, steps=2, variant=kind, compile=mode)
        for mode in ("off", "on")
    ]
    for run in runs:
        train(run)
    assert_same(*map(weights_of, runs))
    assert traced[f"{type(runs[0].drafter).__name__}.forward"] == 2


def is_plain(drafter, target) -> bool:
    layers = [*drafter.backbone.layers, *target.layers]
    attentions = [layer.self_attn for layer in drafter.backbone.layers]
    return not any("forward" in m.__dict__ for m in layers) and not any(
        "keys_values" in m.__dict__ for m in attentions
    )


def test_the_forms_are_in_place_while_training_and_gone_afterwards(traced):
    """A target outlives its runs: what decodes with it next has other shapes."""
    drafter, target = random_drafter(drafter_config()), make_target("llama")
    quick = acceleration.Acceleration(drafter, target)
    assert is_plain(drafter, target)
    with quick.active():
        assert all("forward" in m.__dict__ for m in (*drafter.backbone.layers, *target.layers))
        with quick.suspended():
            assert is_plain(drafter, target)
        assert not is_plain(drafter, target)
    assert is_plain(drafter, target)


def test_a_failing_run_leaves_nothing_compiled_behind(traced, tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded, steps=3, compile="on")
    run.trainer.learn = None  # not callable: the first step fails
    with pytest.raises(TypeError):
        train(run)
    assert is_plain(run.drafter, loaded.target)


def test_flex_is_asked_for_on_a_gpu_alone(traced, monkeypatch):
    drafter, target = random_drafter(drafter_config()), make_target("llama")
    with acceleration.Acceleration(drafter, target).active():
        assert drafter.backbone.attention == "dense", "it has no backward pass on a CPU"
    monkeypatch.setattr(type(drafter), "device", property(lambda _self: torch.device("cuda")))
    with acceleration.Acceleration(drafter, target).active():
        assert drafter.backbone.attention == "flex"
    assert drafter.backbone.attention == "dense"
