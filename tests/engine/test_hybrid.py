"""Hybrid targets on the engine: states after a cycle are those of the committed tokens."""

import random
from dataclasses import replace

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafters import BlockDrafter
from domino_spec.engine import model_runner
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.models import load_model
from domino_spec.engine.sizes import Size, fitting, slot_bytes, token_bytes
from domino_spec.errors import InputError, TargetError
from domino_spec.targets.weight_only import round_model
from tests.engine.replays import Replays
from tests.engine.runs import draft, finish, make_engine, make_requests, own
from tests.engine.stress import Alone, StressTest
from tests.support.drafters import Adversarial
from tests.support.families import (
    HYBRIDS,
    VOCAB,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
)

DEPTH, NEW = 7, 16


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_states_after_any_partial_acceptance_are_those_of_single_steps(family):
    """Padded prompts, then one block of which each sequence accepts another number of drafts."""
    target, count = make_target(family), DEPTH + 1
    model = load_model(own(target), slots=count + 3, capacity=96)
    model.cache.reserve(count)
    lengths = torch.tensor([9, 1, 2, 70, 3, 9, 65, 5])  # some are longer than a chunk of the rule
    prompts, blocks = random_prompts(lengths), random_prompts([count] * count, seed=1)
    slots = torch.tensor([3, 0, 7, 10, 1, 2, 9, 4])
    width = int(lengths.max())
    padded = torch.tensor([prompt + [7] * (width - len(prompt)) for prompt in prompts])
    starts, ends = torch.zeros_like(slots), torch.arange(count) * width + lengths - 1
    model.forward(padded, AttentionMetadata(slots, starts, width, ends=ends))
    for tokens in (random_prompts([count] * count, seed=2), blocks):  # the first is not committed
        model.forward(torch.tensor(tokens), AttentionMetadata(slots, lengths, count))
    model.cache.commit(slots, torch.arange(count))
    for row, (prompt, block) in enumerate(zip(prompts, blocks, strict=True)):
        plain = target.new_cache(1)
        for tokens in (prompt, *([token] for token in block[: row + 1])):
            target.forward(torch.tensor([tokens]), plain, rollback=False)
            plain.commit([len(tokens)])
        for index in (0, 2):
            found, expected = model.cache.recurrent(index), plain.past.layers[index]
            inputs = expected.conv_states[0][0].T[-3:]
            torch.testing.assert_close(
                found.states[slots[row]], expected.recurrent_states[0][0], atol=2e-5, rtol=1e-4
            )
            torch.testing.assert_close(found.inputs[slots[row], :3], inputs, atol=1e-5, rtol=1e-5)


def adversarial(engine, answers):
    """Let the engine draft what is wrong in every way."""
    spoil = Adversarial(answers, depth=DEPTH, vocab=VOCAB).spoil
    draft(
        engine,
        lambda index, done: [
            spoil(done, place, token) for place, token in enumerate(answers[index][done:])
        ],
    )


@pytest.mark.parametrize(("family", "sampled"), [
    ("qwen3_next", False), pytest.param("qwen3_5_text", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_adversarial_drafts_of_sequences_that_come_and_go(family, sampled):
    """More sequences than slots, prompts in chunks; sampled ones by the noise of their seed.

    On a GPU where there is one, against what the CPU writes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, prompts = make_target(family), random_prompts([9, 1, 70, 4])
    params = SamplingParams(max_new_tokens=NEW)
    if sampled:
        params = replace(params, temperature=0.9, top_p=0.95, seed=7, accept="coupled")
        answers = [Alone(target)(prompt, params)[0] for prompt in prompts]
    else:
        answers = [plain_greedy(target.model, prompt, NEW) for prompt in prompts]
    assert all(len(set(text)) > 8 for text in answers), "an error must be able to show"
    room = {"slots": 3, "chunk": 50}
    engine = make_engine(target, random_drafter(), device=device, graphs=False, **room)
    adversarial(engine, answers)
    sequences = make_requests(prompts, params=[params] * 4, seeds=[params.seed] * 4)
    for sequence in sequences:  # the others are in the midst of theirs
        engine.add_request(sequence)
        engine.step()
    finish(engine)
    assert [sequence.output for sequence in sequences] == answers
    accepted = sum(sum(sequence.stats.accepted) for sequence in sequences)
    assert NEW < accepted < sum(sum(sequence.stats.offered) for sequence in sequences)
    if device.type == "cuda":  # the drafter's own drafts, in captured cycles
        captured = make_engine(target, random_drafter(), device=device, **room)
        drafted = make_requests(prompts, params=[params] * 4, seeds=[params.seed] * 4)
        for sequence in drafted:
            captured.add_request(sequence)
        finish(captured)
        assert [sequence.output for sequence in drafted] == answers


def stress(family, seed, turns, *, graphs=False):
    """Arrivals and aborts by chance, with hooks, penalties and every way to sample.

    With `graphs` in batches that are filled up to fixed shapes, as captured ones are.
    """
    alone = Alone(make_target(family))
    engine = make_engine(alone.target, random_drafter(), slots=3, chunk=7, ahead=graphs)
    if graphs:
        engine.runner._graphs = engine.runner._pad = True
        engine.runner.recorder = Replays()
    test = StressTest(engine, random.Random(seed), alone, scripted=True)
    test.run(turns)
    test.check()
    drafting = [sequence.stats for sequence in test.sequences if sequence.speculate]
    assert 2 < sum(sum(s.accepted) for s in drafting) < sum(sum(s.offered) for s in drafting)


@pytest.fixture
def replaying(monkeypatch):
    """What graphs do on a GPU, done here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        model_runner, "_read_back", lambda report, count: report.clone()[:count].cpu
    )


@pytest.mark.usefixtures("replaying")
def test_arrivals_and_aborts_by_chance():
    stress("qwen3_5_text", 3, 12, graphs=True)


@pytest.mark.slow
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 5])
@pytest.mark.parametrize("family", HYBRIDS)
def test_more_arrivals_and_aborts(family, seed, graphs):
    stress(family, seed, 60, graphs=graphs)


def test_trees_and_reuse_are_refused_by_name():
    target, drafter = make_target("qwen3_next"), BlockDrafter(random_drafter())
    with pytest.raises(TargetError, match=r"tree of 12 drafts.*qwen3_next.*linear-att.*tree=0"):
        make_engine(target, drafter, tree=12)
    with pytest.raises(InputError, match=r"reused: qwen3_next.*linear-attention.*Leave `reuse`"):
        make_engine(target, drafter, reuse=True)
    engine = make_engine(target, drafter.with_depth(DEPTH), slots=None, adaptive=True)
    assert engine.nodes == 0  # it would choose trees of other targets


def test_slots_are_counted_with_their_states(monkeypatch):
    target, drafter = make_target("qwen3_5_text"), BlockDrafter(random_drafter()).with_depth(DEPTH)
    engine = make_engine(target, drafter, slots=3, capacity=50)
    tokens, states = token_bytes(target, None), slot_bytes(target, drafter)
    assert engine.target.cache.nbytes == 4 * ((50 + engine.margin) * tokens + states)
    free = 2 * 3 * (1024 * tokens + states)  # half of it may be taken
    for available, found in ((free, 2), (free - 2, 1)):
        sizes = Size(2, 1024), None, 1024
        given = {"per_token": tokens, "per_slot": states, "free": available}
        assert fitting(*sizes, **given) == Size(found, 1024)


def test_quantised_weights_and_other_modules_are_refused():
    target = own(make_target("qwen3_5_text"))
    round_model(target.model, "int8", "tiny", torch.device("cpu"))
    with pytest.raises(TargetError, match="its weights are quantised"):
        make_engine(target)
    target = own(make_target("qwen3_5_text"))

    class Steered(type(target.layers[2].linear_attn)):
        pass

    target.layers[2].linear_attn.__class__ = Steered
    with pytest.raises(TargetError, match="its layer 2 has a Steered"):
        load_model(target, slots=1, capacity=8)
