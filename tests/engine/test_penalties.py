"""Penalties on the device give the reference loop's text, whatever is drafted, in any batch."""

import pytest
import torch

from domino_spec.decoding import SamplingParams, decode
from domino_spec.drafters import BlockDrafter
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.slots import Penalties
from tests.engine.runs import finish, make_engine, make_requests, script
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.runs import make_sequences

PROMPTS = random_prompts([6, 3, 12, 9, 5, 8])
NEW = 24
EACH = [
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 0.7},  # below 1 it encourages, and texts go round in circles
    {"frequency_penalty": -2.5, "presence_penalty": -0.5},
    {"repetition_penalty": 1.2, "presence_penalty": 2.0, "frequency_penalty": -0.4},
]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "accept": "coupled"}


def reference(target, each, proposer=None):
    sequences = make_requests(PROMPTS, params=each)
    for _ in decode(target, proposer or None, sequences):
        pass
    return [sequence.output for sequence in sequences]


def on_engine(engine, each):
    sequences = make_requests(PROMPTS, params=each)
    outputs = list(engine.stream(sequences))
    return [sequence.output for sequence in sequences], outputs


def params_of(common, each=EACH):
    return [SamplingParams(max_new_tokens=NEW, seed=7, **common, **changes) for changes in each]


@pytest.mark.parametrize(
    ("options", "common", "drafts"),
    [
        ({"slots": 6}, {}, True),
        ({"slots": 6}, SAMPLED, False),
        ({"slots": 2, "ahead": True}, SAMPLED, True),
        ({"slots": 2, "ahead": True}, {}, False),
    ],
    ids=str,
)
def test_each_sequence_pays_what_the_reference_loop_makes_it_pay(options, common, drafts):
    target = make_target("llama")
    params = params_of(common)
    expected = reference(target, params)
    free = reference(target, params_of(common, [{}] * len(EACH)))
    assert all(one != other for one, other in zip(expected, free, strict=True))
    assert any(len(set(answer)) < NEW / 3 for answer in expected)  # repeats inside a block
    engine = make_engine(target, random_drafter() if drafts else None, **options)
    if drafts:
        script(engine, expected)
    found, outputs = on_engine(engine, params)
    assert found == expected
    assert (max(output.accepted for output in outputs) > 2) is drafts


@pytest.mark.parametrize("changes", [EACH[0], EACH[2], EACH[5]], ids=str)
def test_a_drafter_that_repeats_itself_is_believed_as_far_as_it_pays(changes):
    """It drafts a b a b …, and each of them costs more than the one before."""
    table = torch.arange(40).view(-1, 2).flip(1).flatten()
    target, drafter = bigram_target(table), knowing_drafter(shift=True, prefix=1, table=table)
    params = SamplingParams(max_new_tokens=40, **changes)
    sequences, own = (make_sequences([[4, 7], [12]], params) for _ in range(2))
    expected = list(decode(target, BlockDrafter(drafter).with_depth(7), sequences))
    found = list(make_engine(target, drafter, slots=2).stream(own))
    assert [each.output for each in own] == [each.output for each in sequences]
    blocks = [
        sorted((o.sequence.index, o.cycle, o.tokens) for o in outputs)
        for outputs in (found, expected)
    ]
    assert blocks[0] == blocks[1]
    assert max(output.accepted for output in found) > 1


def test_sequences_without_a_penalty_in_a_batch_with_one():
    target = make_target("qwen3")
    each = [{}, {"frequency_penalty": 1.0}, {}, {"temperature": 0.8, "top_k": 9}, {}, {}]
    params = [SamplingParams(max_new_tokens=NEW, seed=7, accept="coupled", **c) for c in each]
    expected = reference(target, params)
    engine = make_engine(target, random_drafter(), slots=6)
    script(engine, expected)
    assert on_engine(engine, params)[0] == expected


def test_a_slot_forgets_what_its_last_row_paid_for():
    target = make_target("llama")
    changes = [EACH[0], {}, EACH[2], EACH[5], {}, EACH[0]]
    params = params_of({}, changes)
    engine = make_engine(target, None, slots=1)
    assert on_engine(engine, params)[0] == reference(target, params)


@pytest.mark.parametrize("paid", EACH[:3], ids=str)
def test_who_takes_the_slot_of_one_that_paid_pays_nothing(paid):
    """Also while another one pays, whose cycles look at every slot's values."""
    target = make_target("llama")
    params = params_of({}, [{}, paid, EACH[1], {}, {}, {}])
    expected = reference(target, params)
    engine = make_engine(target, None, slots=2)
    sequences = make_requests(PROMPTS, params=params)
    engine.add_request(sequences[1])
    engine.step()
    slot = sequences[1].slot
    engine.abort(sequences[1])
    engine.add_request(sequences[0])
    engine.step()
    assert sequences[0].slot == slot
    engine.add_request(sequences[2])
    finish(engine)
    assert [sequences[0].output, sequences[2].output] == [expected[0], expected[2]]


def test_a_prompt_that_was_there_already_costs_the_same():
    """Its tokens count for the row however their states came to be."""
    target = make_target("llama")
    params = SamplingParams(max_new_tokens=NEW, repetition_penalty=1.7, presence_penalty=0.5)
    text = PROMPTS[2] + PROMPTS[3]
    engine = make_engine(target, random_drafter(), slots=2, reuse=True, chunk=4)
    for prompt, reused in ((text, 0), (text[:15] + PROMPTS[0], 15)):
        sequence, expected = make_sequences([prompt] * 2, params)
        list(engine.stream([sequence]))
        list(decode(target, None, [expected]))
        assert sequence.cached == reused
        assert sequence.output == expected.output


# What it costs those who pay nothing --------------------------------------------------------------


def test_nothing_is_counted_where_no_sequence_pays():
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    on_engine(engine, params_of({}, [{}] * 6))
    assert engine.slots._penalties is None
    on_engine(engine, params_of({}))
    assert engine.slots.penalties.counts.shape == (3, engine.target.vocab_size)
    plans = [Plan.of([SamplingParams(), SamplingParams(**c)], 7, alone=False) for c in ({}, *EACH)]
    assert [plan.penalised for plan in plans] == [False] + [True] * len(EACH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neutral_values_leave_every_bit_as_it_was(dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 3, 30)).to(dtype)
    logits[0, 1, 5], logits[0, 1, 6] = 0.0, -torch.inf
    penalties = Penalties(3, 30, torch.device("cpu"))
    penalties.open(0, [1, 2], SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3))
    penalties.open(0, [1, 2], SamplingParams())  # counts stay, values are neutral
    penalties.open(1, [1, 2], SamplingParams(presence_penalty=0.5))
    block = torch.tensor([[5, 6, 5], [7, 7, 8]])
    penalties.count(torch.tensor([0, 1]), block, torch.tensor([2, 2]))
    found = penalties.apply(logits, torch.tensor([0, 1]), block)
    assert torch.equal(found[0], logits[0].float())
    assert not torch.equal(found[1], logits[1].float())


def test_counts_are_of_anchors_and_accepted_drafts():
    penalties = Penalties(3, 10, torch.device("cpu"))
    block = torch.tensor([[4, 4, 5, 4], [1, 2, 3, 3]])
    penalties.count(torch.tensor([2, 0]), block, torch.tensor([1, 3]))
    assert penalties.counts[2].tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert penalties.counts[0].tolist() == [0, 1, 1, 2, 0, 0, 0, 0, 0, 0]
    assert penalties.counts[1].sum() == 0


def test_a_caller_with_another_default_type_counts_as_exactly():
    """A bfloat16 cannot tell 256 from 257."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        penalties = Penalties(1, 4, torch.device("cpu"))
        penalties.open(0, [1], SamplingParams(frequency_penalty=0.001))
        slot, again = torch.tensor([0]), torch.tensor([[2]])
        for _ in range(300):
            penalties.count(slot, again, torch.tensor([0]))
        found = penalties.apply(torch.zeros(1, 1, 4), slot, again)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert found[0, 0, 2] == pytest.approx(-0.301)
