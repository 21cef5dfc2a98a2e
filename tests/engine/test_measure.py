"""What the measurements are made of."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import transformers as tf

from domino_spec.bench.engine_report import measure_engine
from domino_spec.bench.settings import EngineSettings
from domino_spec.drafters import BlockDrafter
from domino_spec.engine import measure, mixture, model_runner
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import (
    Bench,
    accepted_pattern,
    bandwidth,
    expected,
    geometric,
    seconds_of,
)
from domino_spec.engine.model_runner import Plan, PromptChunk
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.shapes import (
    SHAPES,
    drafter_config,
    random_drafter,
    random_target,
    target_config,
)
from domino_spec.errors import InputError
from domino_spec.targets import Target
from tests.engine.runs import make_engine
from tests.support.families import CONFIGS, random_prompts, randomise
from tests.support.families import random_drafter as tiny_drafter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench():
    target = random_target("tiny", device=CPU, dtype=torch.float32)
    drafter = BlockDrafter(random_drafter(target), candidates=32)
    engine = Engine(target, drafter, slots=2, capacity=256)
    return Bench(engine, context=64)


@pytest.mark.parametrize("wanted", [1.5, 4.2, 7.17, 15.0])
def test_a_pattern_commits_as_many_tokens_as_it_should(wanted):
    chance = geometric(wanted, 15)
    assert expected(chance, 15) == pytest.approx(wanted)
    pattern = accepted_pattern(chance, 15, length=512)
    assert sum(pattern) / len(pattern) + 1 == pytest.approx(wanted, rel=0.01)
    assert max(pattern) <= 15
    halves = (pattern[:256], pattern[256:])
    assert abs(sum(halves[0]) - sum(halves[1])) < 256, "well mixed"


def test_floors_of_qwen3_8b_are_those_counted_by_hand():
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(target_config("qwen3-8b"), dtype=torch.bfloat16)
    layers = sum(p.numel() for p in model.model.layers.parameters())
    head = model.lm_head.weight.numel()
    context = 36 * 2 * 8 * 128 * 1024
    assert 2 * (layers + head + context) / 1e9 == pytest.approx(15.29, abs=0.01)


def test_stages_name_every_part_and_their_bytes_add_up(bench):
    stages = bench.stages(1, 15)
    assert [stage.name for stage in stages] == [
        "draft backbone", "draft logits and rollout", "verify", "logits and choice",
        "context for the drafter",
    ]  # fmt: skip
    assert all(stage.seconds > 0 for stage in stages)
    assert sum(stage.bytes for stage in stages) == bench.floor_bytes(1, drafts=True)
    plain = bench.floor_bytes(1, drafts=False)
    assert plain == stages[2].bytes + stages[3].bytes


def test_forced_acceptance_commits_what_it_is_told(bench):
    engine = bench.engine
    bench.reset(2)
    engine.runner.force([3, 0, 15])
    slots, plan = torch.tensor([0, 1]), Plan(15, forced=True)
    counts = [engine.runner.run_cycle(slots, plan)[:, 0].tolist() for _ in range(4)]
    assert counts == [[3, 3], [0, 0], [15, 15], [3, 3]]
    assert engine.slots.lengths[:2].tolist() == [64 + 4 + 1 + 16 + 4] * 2
    engine.runner.force([2])
    assert engine.runner.run_cycle(slots, Plan(1, forced=True))[:, 0].tolist() == [1, 1]
    with pytest.raises(InputError, match="the pattern has 0 cycles"):
        engine.runner.force([])


def test_a_cycle_reads_as_many_experts_as_random_prompts_do(monkeypatch):
    """Costs of a mixture are those of the experts that its sequences are routed to."""
    config = CONFIGS["qwen3_moe"]()
    config.num_experts, config.num_experts_per_tok = 64, 4
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    engine = make_engine(Target(model), tiny_drafter(), slots=16)
    read, route = [], mixture.route
    monkeypatch.setattr(
        mixture, "route",
        lambda chosen, *rest: read.append(len(chosen.unique())) or route(chosen, *rest),
    )  # fmt: skip
    bench, runner = Bench(engine, context=64), engine.runner
    found = {}
    for batch, depth in itertools.product((1, 4, 16), (0, 7)):
        bench.reset(batch)
        read.clear()
        runner.run_cycle(torch.arange(batch), Plan(depth))
        cycle, prompts = sum(read), random_prompts([depth + 1] * batch)
        read.clear()
        runner.prefill([PromptChunk(i, 0, own) for i, own in enumerate(prompts)], drafts=False)
        found[batch, depth] = cycle
        assert cycle > 0.75 * sum(read), (batch, depth)
    assert found[1, 0] < found[4, 0] < found[16, 0]
    assert found[1, 7] < found[4, 7] < found[16, 7]


def test_paced_counts_tokens_a_second(bench):
    assert bench.paced(2, 15, [3, 5], cycles=4) > 0


def test_everything_is_launched_on_the_engines_own_gpu(bench, monkeypatch):
    """Kernels go to the current GPU, wherever their tensors are."""
    inside = []

    @contextmanager
    def on_device(device):
        inside.append(device)
        yield
        inside.pop()

    for module in (measure, model_runner):
        monkeypatch.setattr(module, "on_device", on_device, raising=False)
    launched = []

    def watched(plain):
        def run(*arguments):
            launched.append(list(inside))
            return plain(*arguments)

        return run

    for part, name in ((InferenceModel, "forward"), (BlockDrafter, "_hidden")):
        monkeypatch.setattr(part, name, watched(getattr(part, name)))
    for measured in (
        lambda: bench.cycle_seconds(1, Plan(3)),
        lambda: bench.stages(1, 3),
        lambda: bench.paced(1, 3, [1], cycles=2),
    ):
        launched.clear()
        measured()
        assert launched
        assert all(launched)


def test_seconds_and_bandwidth_are_positive():
    assert seconds_of(lambda: torch.ones(4), CPU) > 0
    assert bandwidth(CPU) > 1e8


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_drafter(shape):
    config = target_config(shape)
    drafter = drafter_config(config)
    assert drafter.vocab_size == config.vocab_size
    assert drafter.num_target_layers == config.num_hidden_layers


def test_an_unknown_shape_is_refused_by_name():
    with pytest.raises(InputError, match="no shape is called 'gpt-7'; expected one of qwen3-0.6b"):
        target_config("gpt-7")


def test_the_floor_of_a_quantised_target_is_of_the_bytes_it_stores():
    sizes = {}
    for quantize, bits in ((None, 16), ("fp8", 8), ("int4", 4)):
        target = random_target("tiny", device=CPU, dtype=torch.bfloat16, quantize=quantize)
        layers = sum(m.in_features * m.out_features for layer in target.layers
                     for m in layer.modules() if hasattr(m, "in_features"))  # fmt: skip
        bench = Bench(Engine(target, None, slots=1, capacity=64, pack=False), context=16)
        sizes[bits] = bench.floor_bytes(1, drafts=False) - layers * bits // 8
    rest = sizes.pop(16)  # norms, lm_head, keys and values
    assert all(rest < size < 1.6 * rest for size in sizes.values())  # and scales


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_a_report_holds_all_it_names(quantize):
    settings = EngineSettings(
        shape="tiny", dtype="float32", device="cpu", context=16, candidates=32, rows=(1, 2),
        tokens_per_cycle=(4.2,), quantize=quantize,
    )  # fmt: skip
    said = []
    record = measure_engine(settings, said.append)
    assert record["quantize"] == quantize
    assert {"plain", "cycle"} == record["reference"].keys()
    assert record["cycle"]["bytes"] == sum(stage["bytes"] for stage in record["stages"])
    assert record["plain"]["over_floor"] == pytest.approx(
        record["plain"]["seconds"] * record["bandwidth"] / record["plain"]["bytes"]
    )
    assert [entry["rows"] for entry in record["batches"]] == [1, 2]
    for entry in record["batches"]:
        (gain,) = entry["gains"]
        assert gain["gain"] >= gain["whole"]
        assert gain["gain"] >= 1.0, "plain decoding is one of the depths"
    assert [entry["rows"] for entry in record["loop"]] == [1, 2]
    assert any("Transformers" in line for line in said)
