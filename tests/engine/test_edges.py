"""At the edges: wrong settings, measuring, what an engine does to what it is given."""

import copy

import pytest
import torch
import transformers as tf

from domino_spec.drafters import drafter_of
from domino_spec.engine.calibration import adapt_depth
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.measure import Bench, accepted_pattern
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.policy import depths
from domino_spec.errors import InputError, MismatchError
from domino_spec.targets import Target
from tests.engine.runs import finish, make_engine, make_requests, own, run_engine, run_reference
from tests.support.families import (
    CONFIGS,
    drafter_config,
    make_target,
    random_drafter,
    random_prompts,
    randomise,
)

PROMPTS = random_prompts([3, 9, 5])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    return tmp_path


# What the device cannot do is done wrongly, silently ----------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_what_needs_the_reference_loop_is_refused(rule):
    engine = make_engine(make_target("qwen3"), None)
    hooked = {"temperature": 0.8, "hooks": (lambda prompt, output, logits: logits,)}
    (sequence,) = make_requests(PROMPTS[:1], max_new_tokens=14, accept=rule, **hooked)
    with pytest.raises(InputError, match=f"accept='{rule}' with processors.*reference loop"):
        engine.add_request(sequence)
    assert not engine.busy


# Calibration of a busy engine ---------------------------------------------------------------------


def test_an_engine_that_is_not_idle_is_not_measured():
    target = make_target("qwen3")
    expected = run_reference(target, None, PROMPTS[:1], max_new_tokens=14)[0]
    engine = make_engine(target, random_drafter(), slots=1)
    (sequence,) = make_requests(PROMPTS[:1], max_new_tokens=14)
    engine.add_request(sequence)
    engine.step()
    with pytest.raises(InputError, match="1 sequences are running"):
        adapt_depth(engine)
    with pytest.raises(InputError, match="1 sequences are running"):
        Bench(engine, context=8)
    finish(engine)
    assert sequence.output == expected[0]


# Forced acceptance stays in captured graphs -------------------------------------------------------


def test_an_engine_decodes_rightly_after_it_was_paced():
    target = make_target("qwen3")
    expected = run_reference(target, None, PROMPTS, max_new_tokens=14)[0]
    engine = make_engine(target, random_drafter(), slots=1)
    Bench(engine, context=16).paced(1, engine.depth, [3, 5], cycles=3)
    found, _, _ = run_engine(engine, PROMPTS, max_new_tokens=14)
    assert found == expected


# Costs of another engine --------------------------------------------------------------------------


def kept_keys(cache):
    return len(list((cache / "costs").iterdir()))


def test_a_deeper_engine_is_measured_as_deep_as_it_goes():
    for depth in (2, 7):
        engine = make_engine(make_target("llama"), random_drafter(), slots=1, depth=depth)
        policy = adapt_depth(engine)
        assert tuple(policy.costs(1)) == depths(depth)


def test_a_wider_mlp_has_costs_of_its_own(cache):
    for width in (64, 1024):
        config = CONFIGS["llama"]()
        config.intermediate_size = width
        model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
        adapt_depth(Engine(Target(model), drafter_of(random_drafter()), slots=1, capacity=64))
    assert kept_keys(cache) == 2


def test_packed_weights_have_costs_of_their_own(cache):
    for pack in (True, False):
        adapt_depth(make_engine(make_target("llama"), random_drafter(), slots=1, pack=pack))
    assert kept_keys(cache) == 2


# The end of a slot --------------------------------------------------------------------------------


def test_a_sequence_that_fills_its_slot_drafts_as_in_a_larger_one():
    """The last blocks reach past the sequence's end, where the drafter's slots see each other."""
    target, drafter = make_target("llama"), random_drafter()
    prompt, new = [5, 9, 11, 3], 21
    found = [
        run_engine(make_engine(target, drafter, capacity=room), [prompt], max_new_tokens=new)
        for room in (len(prompt) + new, 192)
    ]
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2]


def test_measuring_plain_steps_does_no_drafter_work(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter())

    def troubled(*_args, **_kwargs):
        raise AssertionError("the drafter was asked")

    monkeypatch.setattr(engine.drafter, "update_cache", troubled)
    monkeypatch.setattr(engine.drafter, "propose", troubled)
    Bench(engine, context=8).plain_seconds(1)
    with pytest.raises(AssertionError, match="asked"):
        Bench(engine, context=8).cycle_seconds(1, Plan(0))


# Depth 0 with a policy ----------------------------------------------------------------------------


def test_an_engine_of_depth_zero_with_a_policy_decodes():
    target = make_target("qwen3")
    engine = make_engine(target, random_drafter(), slots=1, depth=0)
    adapt_depth(engine)
    run_engine(engine, PROMPTS[:1], max_new_tokens=80)


# Wrong settings say so ----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ({"depth": 9}, "depth is 9; this drafter .* gives 0 to 8"),
    ({"depth": -1}, "depth is -1"),
    ({"candidates": 0}, "candidates is 0"),
    ({"graphs": True}, "graphs are CUDA's"),
    ({"slots": 0}, "slots is 0"),
    ({"capacity": 0}, "capacity is 0"),
])  # fmt: skip
def test_wrong_settings_are_refused_in_words(options, words):
    with pytest.raises(InputError, match=words):
        make_engine(make_target("qwen3"), random_drafter(), **options)


def test_what_drafts_is_refused_without_a_drafter():
    with pytest.raises(InputError, match="depth is 3 without a drafter"):
        make_engine(make_target("qwen3"), None, depth=3)


@pytest.mark.parametrize(("prompt", "words"), [
    ([], "the prompt is empty"),
    ([5, -1], "ids from -1 to 5; the target knows 0 to 96"),
    ([5, 97], "ids from 5 to 97"),
])  # fmt: skip
def test_wrong_prompts_are_refused_in_words(prompt, words):
    engine = make_engine(make_target("qwen3"), None, slots=1)
    with pytest.raises(InputError, match=words):
        engine.add_request(*make_requests([prompt], max_new_tokens=5))
    assert not engine.busy


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_target_layers": 40, "target_layer_ids": (1, 3, 39)}, "target layers: .* made for 40"),
    ({"vocab_size": 98}, "vocabulary: .* made for 98, the target has 97"),
])  # fmt: skip
def test_a_drafter_for_another_target_is_refused(changes, words):
    drafter = random_drafter(drafter_config(**changes))
    with pytest.raises(MismatchError, match=words):
        make_engine(make_target("qwen3"), drafter, slots=1)


# What an engine does to what it is given ----------------------------------------------------------


def test_the_callers_drafter_keeps_its_type():
    target = own(make_target("qwen3"))
    target.model.to(torch.bfloat16)
    drafter = random_drafter()
    before = copy.deepcopy(drafter.state_dict())
    Engine(target, drafter_of(drafter), slots=1, capacity=32)
    assert drafter.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in drafter.state_dict().items())


def test_two_engines_of_one_target_share_its_weights():
    target = own(make_target("llama"))
    engines = [Engine(target, None, slots=1, capacity=32, pack=False) for _ in range(2)]
    first, second = (engine.target.layers[0] for engine in engines)
    assert first.qkv.data_ptr() == second.qkv.data_ptr()
    assert first.gate_up.data_ptr() == second.gate_up.data_ptr()


# Patterns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [45, 4])
def test_a_pattern_of_any_length_keeps_its_shares(length):
    pattern = accepted_pattern(0.9, 15, length=length)
    drawn = [(index + 0.5) / length for index in range(length)]
    expected = [sum(d < 0.9**i for i in range(1, 16)) for d in drawn]
    assert sorted(pattern) == sorted(expected)


# Heads that the kernels cannot take ---------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "fine"), [(128, True), (96, True), (72, False), (8, False)])
def test_which_heads_the_kernels_take(head_dim, fine):
    assert kernels_take(head_dim) is fine
