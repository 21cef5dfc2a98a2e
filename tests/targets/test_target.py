"""Captured hidden states, ends and the cache of a target."""

import pytest
import torch
import transformers as tf

from domino_spec import DominoDecoder, DominoGenerate
from domino_spec.errors import InputError
from domino_spec.targets import Target, probe_target, read
from tests.support.families import (
    CONFIGS,
    HYBRIDS,
    VOCAB,
    make_model,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
    randomise,
)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", *HYBRIDS])
def test_captured_states_are_layer_outputs_without_the_final_norm(family):
    target = make_target(family)
    ids = torch.tensor(random_prompts((9,)))
    last = target.num_layers - 1
    found = target.forward(ids, target.new_cache(1), capture_layers=(0, 1, last)).captured
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    first, middle, final = found.chunk(3, dim=-1)
    torch.testing.assert_close(first, states[1])
    torch.testing.assert_close(middle, states[2])
    assert not torch.allclose(final, states[last + 1]), "the last state in the list is normed"


@pytest.mark.parametrize("family", CONFIGS)
def test_the_final_hidden_id_names_what_the_lm_head_reads(family):
    target = make_target(family)
    ids = torch.tensor(random_prompts((9,)))
    output = target.forward(
        ids, target.new_cache(1), capture_layers=(target.final_hidden_id,), keep=[8]
    )
    assert output.captured.shape == (1, 9, target.hidden_size), (
        "of every position, not of those kept"
    )
    torch.testing.assert_close(target.logits(output.captured[:, 8:]), output.logits)
    reading = read(target, ids, capture_layers=(1, target.final_hidden_id))
    torch.testing.assert_close(reading.captured[..., target.hidden_size :], reading.hidden)


def test_hooks_are_gone_after_a_forward():
    target = make_target("llama")
    before = [dict(layer._forward_hooks) for layer in target.layers]
    target.forward(torch.tensor([[5, 6]]), target.new_cache(1), capture_layers=(1, 2))
    assert [dict(layer._forward_hooks) for layer in target.layers] == before


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_embeddings_are_the_models_own(family):
    """Scaled embeddings, scaled logits and soft-caps included."""
    target = make_target(family)
    ids = torch.tensor(random_prompts((7,)))
    seen = {}
    handles = [
        target.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: seen.__setitem__("in", (*args, kwargs)[0]), with_kwargs=True
        ),
        target.lm_head.register_forward_pre_hook(lambda _m, args: seen.__setitem__("out", args[0])),
    ]
    with torch.no_grad():
        logits = target.model(ids).logits
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(target.logits(seen["out"]), logits)
    some = torch.tensor([5, 90, 3])
    torch.testing.assert_close(target.logits(seen["out"], some), logits[..., some])
    if family != "gpt2":  # adds learned positions, which belong to no token
        torch.testing.assert_close(target.embed(ids), seen["in"])


def test_reduced_logits_follow_the_weights():
    target = Target(make_model("llama"))
    hidden, some = torch.randn(2, 32), torch.tensor([5, 90, 3])
    with torch.no_grad():
        before = target.logits(hidden, some)
        torch.testing.assert_close(target.logits(hidden, some), before)
        target.lm_head.weight.mul_(2)
        torch.testing.assert_close(target.logits(hidden, some), 2 * before)
        other = torch.tensor([1, 2])
        torch.testing.assert_close(target.logits(hidden, other), target.logits(hidden)[:, other])


def test_scales_and_caps_are_found():
    assert make_target("granite").embedding_scale == pytest.approx(3.0)
    assert make_target("granite").logit_scale == pytest.approx(0.25)
    assert make_target("cohere").logit_scale == pytest.approx(0.0625)
    assert make_target("gemma2").logit_softcap == 30.0
    assert make_target("llama").embedding_scale == 1.0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", *HYBRIDS])
def test_roll_back_of_ragged_rows_is_exact(family):
    """Rows that keep different parts of garbage-filled blocks equal rows that never saw it."""
    target = make_target(family)
    prompts = random_prompts((8, 3, 5))
    generator = torch.Generator().manual_seed(1)
    truth = [list(prompt) for prompt in prompts]
    cache = target.new_cache(3)
    padded = torch.zeros(3, 8, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    target.forward(padded, cache)
    cache.commit([8, 3, 5])
    for keep in ([1, 4, 2], [4, 0, 1], [0, 4, 3], [2, 2, 2]):
        block = torch.randint(3, VOCAB, (3, 4), generator=generator)
        target.forward(block, cache)
        cache.commit(keep)
        for row, count in enumerate(keep):
            truth[row] += block[row, :count].tolist()
    assert cache.lengths == [len(row) for row in truth]
    block = torch.randint(3, VOCAB, (3, 4), generator=generator)
    found = target.forward(block, cache).logits
    for row in range(3):
        with torch.no_grad():
            whole = target.model(torch.tensor([truth[row] + block[row].tolist()])).logits[0, -4:]
        torch.testing.assert_close(found[row], whole, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
def test_selecting_rows_keeps_their_states(family):
    target = make_target(family)
    cache = target.new_cache(3)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]])
    target.forward(ids, cache)
    cache.commit([4, 2, 3])
    cache.select([2, 1])
    assert cache.lengths == [3, 2]
    found = target.forward(torch.tensor([[20], [21]]), cache).logits
    with torch.no_grad():
        third = target.model(torch.tensor([[11, 12, 13, 20]])).logits[0, -1]
        second = target.model(torch.tensor([[9, 10, 21]])).logits[0, -1]
    torch.testing.assert_close(found[:, 0], torch.stack((third, second)), atol=1e-4, rtol=1e-4)


def test_sliding_layers_keep_what_a_roll_back_needs():
    target = make_target("gemma3_text")
    cache = target.new_cache(1)
    target.forward(torch.tensor(random_prompts((40,))), cache)
    cache.commit([40])
    assert {layer.keys.shape[2] for layer in cache.past.layers} == {40}


def test_kept_logits_are_those_asked_for():
    target = make_target("llama")
    ids = torch.tensor(random_prompts((9,)))
    every = target.forward(ids, target.new_cache(1)).logits
    some = target.forward(ids, target.new_cache(1), keep=[8, 2, 8]).logits
    torch.testing.assert_close(some, every[:, [2, 8]])


def test_a_models_training_mode_is_left_as_it_was():
    model = make_model("gpt2").train()  # has dropout
    target = Target(model)
    probe_target(target)
    ids = torch.tensor(random_prompts((9,)))
    first, second = (target.forward(ids, target.new_cache(1)).logits for _ in range(2))
    assert torch.equal(first, second)
    assert model.training


_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
_SMOOTH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope_model(rope_type, *, seed=0, **parameters):
    """A tiny Llama of 24 positions; longrope's switch is at 24 of 48."""
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 48 if rope_type == "longrope" else 24
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}
    model = tf.AutoModelForCausalLM.from_config(config).double().eval()
    return randomise(model, 0.25, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rope_type", "parameters"),
    [
        ("dynamic", {"factor": 2.0}),
        ("longrope", {**_FACTORS, "original_max_position_embeddings": 24}),
    ],
)
def test_the_context_ends_where_rope_frequencies_change(rope_type, parameters, seed):
    model = rope_model(rope_type, seed=seed, **parameters)
    target = Target(model)
    probe_target(target)
    assert target.context_length == target.static_rope_limit == 24
    prompts = random_prompts((6, 12), seed=seed)
    decoder = DominoDecoder(target, random_drafter().double())
    generate = DominoGenerate(random_drafter().double())
    longest = torch.tensor([prompts[1]])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    too_long = r"context of 24.*RoPE frequencies.*at most 12 new tokens"
    with pytest.raises(InputError, match=too_long):
        decoder.generate(prompts, max_new_tokens=13)
    with pytest.raises(InputError, match=too_long):
        model.generate(longest, max_new_tokens=13, custom_generate=generate, **options)
    # Frequencies left behind by a longer sequence are the model's own to reset.
    model.generate(longest, max_new_tokens=20, **options)
    found = decoder.generate(prompts, max_new_tokens=12, ignore_eos=True)
    assert [row.tokens for row in found] == [plain_greedy(model, prompt, 12) for prompt in prompts]
    plain = model.generate(longest, max_new_tokens=12, **options)
    assert torch.equal(
        model.generate(longest, max_new_tokens=12, custom_generate=generate, **options), plain
    )


@pytest.mark.parametrize(
    ("rope_type", "parameters"),
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("yarn", {"factor": 2.0, "original_max_position_embeddings": 12}),
        ("llama3", {**_SMOOTH, "original_max_position_embeddings": 12}),
    ],
)
def test_constant_rope_frequencies_are_exact_past_the_context(rope_type, parameters):
    model = rope_model(rope_type, **parameters)
    assert Target(model).static_rope_limit is None
    prompt = torch.tensor(random_prompts((18,)))
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generate = DominoGenerate(random_drafter().double())
    assert torch.equal(
        model.generate(prompt, custom_generate=generate, **options),
        model.generate(prompt, **options),
    )


def test_half_precision_targets_pass_the_probe():
    model = make_model("qwen3").to(torch.bfloat16)
    target = Target(model)
    probe_target(target)
    assert target.batch_refusal is None
    assert target.dtype == torch.bfloat16
