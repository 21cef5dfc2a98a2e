"""Hybrid targets: what linear-attention layers sum up is what plain decoding would have."""

import pytest
import torch
import transformers as tf

from domino_spec import DominoDecoder
from domino_spec.decoding import RunStats, SamplingParams, decode
from domino_spec.decoding.loop import prompt_scores
from domino_spec.drafters import BlockDrafter, open_drafter
from domino_spec.errors import InputError, TargetError
from domino_spec.targets import Target, probe_target
from tests.decoding.test_sampling import sample_pairs
from tests.support.distribution import deviations, enumerated
from tests.support.drafters import Adversarial, Good
from tests.support.families import (
    HYBRIDS,
    VOCAB,
    drafter_config,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
    randomise,
    slow_decay,
)
from tests.support.runs import make_sequences, run

DEPTH = 7


def states_of(cache):
    """Convolution and recurrent states of every linear-attention layer."""
    layers = [layer for layer in cache.past.layers if hasattr(layer, "recurrent_states")]
    return [states[0] for layer in layers for states in (layer.conv_states, layer.recurrent_states)]


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_after_a_partial_acceptance_are_those_of_single_steps(family):
    """Of a padded batch, each sequence with another number of accepted drafts."""
    target = make_target(family)
    prompts, kept = random_prompts((9, 2, 5, 5)), [3, 6, 1, 0]
    block = torch.tensor(random_prompts((6,) * 4, seed=1))
    cache = target.new_cache(4)
    padded = torch.tensor([[*prompt, *[7] * (9 - len(prompt))] for prompt in prompts])
    target.forward(padded, cache)
    cache.commit([len(prompt) for prompt in prompts])
    target.forward(block, cache)
    cache.commit(kept)
    for row, count in enumerate(kept):
        plain = target.new_cache(1)
        for token in [*prompts[row], *block[row, :count].tolist()]:
            target.forward(torch.tensor([[token]]), plain, rollback=False)
            plain.commit([1])
        for found, expected in zip(states_of(cache), states_of(plain), strict=True):
            torch.testing.assert_close(found[row], expected[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_replay_has_the_bits_of_a_forward_that_ended_there(family):
    target = make_target(family)
    (prompt,), (block,) = random_prompts((6,)), random_prompts((5,), seed=1)
    states = []
    for tokens in (block, [*block[:3], 4, 4]):
        cache = target.new_cache(1)
        target.forward(torch.tensor([prompt]), cache)
        cache.commit([6])
        target.forward(torch.tensor([tokens]), cache)
        cache.commit([3])
        states.append(states_of(cache))
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_prompts_of_several_chunks():
    """The kernels work in chunks of 64 tokens."""
    target = make_target("qwen3_5_text")
    prompts = random_prompts((70, 131))
    answers = [plain_greedy(target.model, prompt, 20) for prompt in prompts]
    assert all(len(set(answer)) > 10 for answer in answers), "an error must be able to show"
    proposer = Good(answers, depth=DEPTH, vocab=VOCAB)
    assert run(target, proposer, prompts, max_new_tokens=20)[0] == answers


def other_family():
    """Of the same form, with modules of its own."""
    config = tf.OlmoHybridConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    target = Target(slow_decay(randomise(model, 0.25)), name="olmo_hybrid")
    probe_target(target)
    return target


def test_another_family():
    target, prompts = other_family(), random_prompts((5, 9))
    answers = [plain_greedy(target.model, prompt, 10) for prompt in prompts]
    proposer = Adversarial(answers, depth=DEPTH, vocab=VOCAB)
    assert run(target, proposer, prompts, max_new_tokens=10)[0] == answers


@pytest.fixture(scope="module")
def small():
    """A hybrid with few tokens, and a drafter that is sometimes right."""
    config = tf.Qwen3_5TextConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"], max_position_embeddings=64,
    )  # fmt: skip
    model = randomise(tf.AutoModelForCausalLM.from_config(config).float().eval(), 0.5, seed=5)
    target = Target(slow_decay(model))
    probe_target(target)
    shape = {"hidden_size": 16, "vocab_size": 12, "num_target_layers": 2, "mask_token_id": 11}
    return target, random_drafter(drafter_config(**shape, target_layer_ids=(0, 1)), seed=6)


RULES = ("coupled", "match", "block", "rejection")


@pytest.mark.parametrize("accept", RULES)
def test_samples_are_drawn_from_what_the_target_says_of_their_text(small, accept):
    """A state that a rejected draft had entered would show in the scores of what comes later."""
    target, drafter = small
    prompts = [[3, 7, 1], [5], [2, 2, 9, 4, 8, 8, 1]]
    params = {"max_new_tokens": 16, "temperature": 0.9, "seed": 3, "accept": accept}
    sequences = make_sequences(prompts, SamplingParams(**params, logprobs=0))
    scores = [[] for _ in sequences]
    stats = RunStats()
    for output in decode(target, BlockDrafter(drafter).with_depth(3), sequences, stats):
        scores[output.sequence.index] += [score.logprob for score in output.scores]
    assert 0 < sum(stats.acceptance.accepted) < sum(stats.acceptance.offered)
    for sequence, found in zip(sequences, scores, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([[*sequence.prompt, *sequence.output]])).logits[0]
        own = logits[len(sequence.prompt) - 1 : -1].log_softmax(-1)
        assert found == pytest.approx(own[range(16), sequence.output].tolist(), abs=1e-3)
    if accept in ("coupled", "match"):  # they draw the target's token with the position's noise
        plain, _ = run(target, None, prompts, **params)
        assert [sequence.output for sequence in sequences] == plain


@pytest.mark.slow
@pytest.mark.parametrize("accept", RULES)
def test_samples_follow_the_targets_distribution(small, accept):
    target, drafter = small
    params = SamplingParams(max_new_tokens=4, seed=11, temperature=0.9, accept=accept)
    exact = enumerated(target, params, [3, 7, 1], 3)
    pairs, rate = sample_pairs(target, drafter, params)
    assert 0.02 < rate < 0.9, "drafts must be both accepted and rejected for the test to see"
    assert deviations(pairs, exact) < 4


def test_prompt_scores_go_on_from_part_to_part(monkeypatch):
    monkeypatch.setattr("domino_spec.decoding.loop._SCORED_AT_ONCE", 4)
    target = make_target("qwen3_5_text")
    (prompt,) = random_prompts((11,))
    with torch.no_grad():
        logprobs = target.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
    found = [score.logprob for score in prompt_scores(target, prompt, 1)[1:]]
    assert found == pytest.approx(expected, abs=1e-4)


def test_trees_are_refused_by_name():
    target = make_target("qwen3_next")
    proposer = BlockDrafter(random_drafter()).with_depth(DEPTH).with_tree(12)
    refusal = r"tree of 12 drafts.*qwen3_next.*linear-attention.*tree=0"
    with pytest.raises(TargetError, match=refusal):
        run(target, proposer, random_prompts((5,)), max_new_tokens=4)
    with pytest.raises(TargetError, match=refusal):
        open_drafter(proposer, target)


def test_what_the_engine_does_not_run_the_reference_loop_decodes():
    target, (prompt,) = other_family(), random_prompts((9,))
    with pytest.raises(InputError, match="OlmoHybridForCausalLM; the engine runs"):
        DominoDecoder(target, random_drafter(), engine="fast")
    decoder = DominoDecoder(target, random_drafter())
    with pytest.warns(match="reference loop.*OlmoHybridForCausalLM"):
        result = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True)
    assert result.tokens == plain_greedy(target.model, prompt, 12)
    assert "OlmoHybridForCausalLM" in result.run.engine_reason
