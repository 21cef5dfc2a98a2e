"""The engine does what the reference loop does, token by token, on a CPU in float32."""

import pytest
import torch
import transformers as tf

from domino_spec.decoding import SamplingParams
from domino_spec.engine.engine import Engine
from domino_spec.errors import InputError, TargetError
from domino_spec.targets import Target
from tests.engine.runs import make_engine, own, run_engine, run_reference
from tests.support.families import (
    CONFIGS,
    drafter_config,
    make_target,
    markov_head,
    random_drafter,
    random_prompts,
    randomise,
)
from tests.support.pair import SIZE, bigram_target, knowing_drafter, successor
from tests.support.runs import make_rows

LEAN = ["llama", "qwen2", "qwen3", "mistral"]
PROMPTS = random_prompts([3, 1, 9, 5, 14])
DRAFTERS = {
    "shift": {},
    "no shift": {"shift": False, "prefix": 0},
    "shift, prefix 0": {"prefix": 0},
    "plain": {"head": False, "shift": False},
    "markov": {"head": markov_head()},
    "reduced": {"draft_vocab_size": 40},
    "own rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "sliding, causal": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
        "causal_window": True,
    },
}


def compare(target, drafter, *, depth=None, candidates=None, prompts=PROMPTS, eos=(), **options):
    expected, counts, blocks = run_reference(
        target, drafter, prompts, depth=depth, candidates=candidates, eos=eos, max_new_tokens=20
    )
    engine = make_engine(target, drafter, depth=depth, candidates=candidates, **options)
    found, own_counts, own_blocks = run_engine(engine, prompts, eos=eos, max_new_tokens=20)
    assert found == expected
    assert (own_counts.committed, own_counts.cycles) == (counts.committed, counts.cycles)
    return own_blocks, blocks


@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_tokens_and_drafts_are_the_reference_loops(family, kind):
    drafter = random_drafter(drafter_config(**DRAFTERS[kind]))
    found, expected = compare(make_target(family), drafter)
    # The reference loop drafts less at a row's end.
    assert len(found) >= len(expected) > 20
    assert all(any(b[: len(e)] == e for b in found) for e in expected)


@pytest.mark.parametrize("options", [
    {"slots": 1}, {"slots": 2}, {"slots": 8}, {"ahead": True}, {"slots": 2, "ahead": True},
    {"depth": 3}, {"depth": 8}, {"candidates": 4}, {"pack": False},
], ids=str)  # fmt: skip
def test_slots_depths_and_cycles_ahead_change_nothing(options):
    drafter = random_drafter()
    compare(make_target("qwen3"), drafter, **options)


@pytest.mark.parametrize("family", LEAN)
def test_plain_decoding(family):
    compare(make_target(family), None)


def test_rows_stop_at_the_end_token():
    target = make_target("llama")
    drafter = random_drafter()
    plain, _, _ = run_reference(target, None, PROMPTS, depth=0, candidates=None, max_new_tokens=20)
    eos = {plain[0][4], plain[2][7]}
    compare(target, drafter, eos=eos)
    compare(target, drafter, eos=eos, ahead=True, slots=2)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (True, 0), (False, 0)])
def test_a_drafter_that_knows_is_believed(shift, prefix, ahead):
    engine = make_engine(bigram_target(), knowing_drafter(shift=shift, prefix=prefix), ahead=ahead)
    prompts = [[1, 2], [5], [9, 9, 9]]
    found, counts, _ = run_engine(engine, prompts, max_new_tokens=33)
    after = successor()
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer[0] == after[prompt[-1]]
        assert [int(after[token]) for token in answer[:-1]] == answer[1:]
    assert counts.tokens_per_cycle > SIZE // 10
    assert all(share == 1.0 for share in counts.acceptance_by_position)


# Sampling -----------------------------------------------------------------------------------------

SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.1, "top_k": 20, "top_p": 0.95},
]


@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_a_seed_gives_the_same_text_with_a_drafter_and_without(params):
    target = make_target("qwen3")
    seeds = [3, 1 << 40, 5, 6, 7]
    common = {"seeds": seeds, "max_new_tokens": 20, **params}
    plain, _, _ = run_engine(make_engine(target, None), PROMPTS, **common)
    drafted, _, _ = run_engine(make_engine(target, random_drafter()), PROMPTS, **common)
    alone, _, _ = run_engine(make_engine(target, random_drafter(), slots=1), PROMPTS, **common)
    assert plain == drafted == alone
    other, _, _ = run_engine(
        make_engine(target, None), PROMPTS, **common | {"seeds": [seed + 1 for seed in seeds]}
    )
    assert other != plain


@pytest.mark.parametrize("params", SAMPLED, ids=str)
@pytest.mark.parametrize("candidates", [None, 8])
def test_sampled_tokens_and_drafts_are_the_reference_loops(params, candidates):
    """Coupled draws are the same numbers everywhere: exactness can be told token by token."""
    target, drafter = make_target("qwen3"), random_drafter(drafter_config(draft_vocab_size=40))
    expected, counts, blocks = run_reference(
        target, drafter, PROMPTS, depth=None, candidates=candidates, max_new_tokens=20, seed=11,
        accept="coupled", **params,
    )  # fmt: skip
    engine = make_engine(target, drafter, candidates=candidates)
    seeds = [11 + row for row in range(len(PROMPTS))]
    found, own_counts, own_blocks = run_engine(
        engine, PROMPTS, seeds=seeds, max_new_tokens=20, **params
    )
    assert found == expected
    assert own_counts.cycles == counts.cycles
    assert all(any(b[: len(e)] == e for b in own_blocks) for e in blocks)


def test_each_row_samples_by_its_own_parameters():
    target = make_target("llama")
    each = [SamplingParams(max_new_tokens=20, **p) for p in ({}, *SAMPLED)]
    together, _, _ = run_engine(
        make_engine(target, random_drafter(), slots=5), PROMPTS, seeds=[9] * 5, params=each
    )
    for prompt, params, answer in zip(PROMPTS, each, together, strict=True):
        alone, _, _ = run_engine(
            make_engine(target, None, slots=1), [prompt], seeds=[9], params=[params]
        )
        assert alone[0] == answer


def test_sampled_tokens_follow_the_target():
    """Chi-square of the second token, over many seeds, against the target's own distribution."""
    target = make_target("llama")
    engine = make_engine(target, random_drafter(drafter_config(prefix=0)), slots=16)
    draws = 3000
    params = {"max_new_tokens": 2, "temperature": 1.0, "top_k": 6}
    answers, _, _ = run_engine(engine, [[5, 9]] * draws, seeds=list(range(draws)), **params)
    first = max({a[0] for a in answers}, key=[a[0] for a in answers].count)
    seconds = [a[1] for a in answers if a[0] == first]
    with torch.no_grad():
        logits = target.model(torch.tensor([[5, 9, first]])).logits[0, -1]
    values, tokens = logits.topk(6)
    expected = values.softmax(-1) * len(seconds)
    counts = torch.tensor([seconds.count(token) for token in tokens.tolist()])
    assert counts.sum() == len(seconds) > 300
    large = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[large].sum()
    assert statistic < 20.5  # 5 degrees of freedom: beyond it once in a thousand


# Rows come and go ---------------------------------------------------------------------------------


def test_a_row_admitted_later_gets_the_same_text():
    target = make_target("qwen3")
    engine = make_engine(target, random_drafter(), slots=2)
    params = SamplingParams(max_new_tokens=20)
    first, second = make_rows(engine.slots, PROMPTS[:2], params)
    engine.admit(first, params)
    for _ in range(3):
        engine.step()
    engine.admit(second, params)
    while engine.running:
        engine.step()
    expected, _, _ = run_reference(
        target, None, PROMPTS[:2], depth=0, candidates=None, max_new_tokens=20
    )
    assert [first.generated, second.generated] == expected


def test_a_row_that_leaves_frees_its_slot_and_disturbs_nobody():
    target = make_target("qwen3")
    engine = make_engine(target, random_drafter(), slots=2, ahead=True)
    params = SamplingParams(max_new_tokens=20)
    rows = make_rows(engine.slots, PROMPTS[:3], params)
    engine.admit(rows[0], params)
    engine.admit(rows[1], params)
    engine.step()
    engine.release(rows[0])
    assert engine.free == 1
    engine.admit(rows[2], params)
    while engine.running:
        engine.step()
    expected, _, _ = run_reference(
        target, None, PROMPTS[:3], depth=0, candidates=None, max_new_tokens=20
    )
    assert [rows[1].generated, rows[2].generated] == expected[1:]


def test_a_full_engine_and_a_long_row_are_refused():
    engine = make_engine(make_target("llama"), None, slots=1, capacity=32)
    params = SamplingParams(max_new_tokens=20)
    rows = make_rows(engine.slots, [[1, 2], [3], [4] * 13], params)
    with pytest.raises(InputError, match="needs 33 tokens .* a slot holds 32"):
        engine.admit(rows[2], params)
    engine.admit(rows[0], params)
    with pytest.raises(InputError, match="all 1 slots are taken"):
        engine.admit(rows[1], params)


# Targets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "reason"), [
    ("gemma2", "Gemma2ForCausalLM"), ("granite", "GraniteForCausalLM"), ("gpt2", "GPT2"),
])  # fmt: skip
def test_other_families_are_refused_with_a_reason(family, reason):
    with pytest.raises(TargetError, match=reason):
        Engine(own(make_target(family)), None)


def biased(**changes):
    """A Llama with biases, each of them large enough to count."""
    config = CONFIGS["llama"]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.25)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    return Target(model)


def test_biases_of_attention_count_and_those_of_an_mlp_are_refused():
    with pytest.raises(TargetError, match="its MLP has biases"):
        Engine(biased(mlp_bias=True), None)
    target = biased(attention_bias=True)
    assert target.layers[0].self_attn.o_proj.bias is not None
    compare(target, random_drafter())


@pytest.mark.parametrize("family", LEAN)
def test_the_model_keeps_working_and_nothing_is_held_twice(family):
    target = own(make_target(family))
    ids = torch.tensor([[5, 9, 11, 4]])
    with torch.no_grad():
        before = target.model(ids).logits
        engine = Engine(target, None, capacity=32, pack=False)
        assert torch.equal(target.model(ids).logits, before)
    held = {tensor.untyped_storage().data_ptr() for tensor in target.model.parameters()}
    for weights in engine.target.layers:
        for tensor in vars(weights).values():
            assert tensor is None or tensor.untyped_storage().data_ptr() in held
