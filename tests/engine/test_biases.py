"""Biases and minimum lengths on the device give the reference loop's text, whatever is drafted."""

import pytest
import torch

from domino_spec.decoding import SamplingParams, decode
from domino_spec.engine.model_runner import Plan
from domino_spec.errors import InputError
from tests.engine.runs import finish, make_engine, make_requests, opened, script
from tests.support.families import VOCAB, make_target, random_drafter, random_prompts

PROMPTS = random_prompts([6, 3, 12, 9, 5])
NEW = 10
ENDS = tuple(range(0, VOCAB, 3))
"""So many that without a minimum a sequence ends within a few tokens."""
BANNED = dict.fromkeys(range(0, VOCAB, 2), -100.0)
EACH = [
    {"min_tokens": 7},
    {"logit_bias": BANNED, "frequency_penalty": 0.7},
    {},
    {"logit_bias": {5: 2.5, 9: -1.0}, "min_tokens": NEW},
    {"logit_bias": {11: 100}, "repetition_penalty": 1.4, "ignore_eos": True},
]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def params_of(common):
    return [SamplingParams(max_new_tokens=NEW, seed=3, **common, **own) for own in EACH]


def reference(target, params, drafter=None):
    sequences = make_requests(PROMPTS, params=params, eos=ENDS)
    for _ in decode(target, drafter, sequences):
        pass
    return [sequence.output for sequence in sequences]


def on_engine(engine, params):
    sequences = make_requests(PROMPTS, params=params, eos=ENDS)
    outputs = list(engine.stream(sequences))
    return [sequence.output for sequence in sequences], outputs


def ends_where_it_may(outputs) -> bool:
    """Whether each output keeps to its own parameters; the first end token is its last."""
    short, odd, free, full, forced = outputs
    ended = [[token in ENDS for token in output] for output in (short, free)]
    return (
        all(sum(each) == each[-1] for each in ended)
        and len(short) >= 7 > len(free)
        and len(full) == NEW
        and not any(token in ENDS for token in full[:-1])
        and not any(token in BANNED for token in odd)
        and set(forced) == {11}
    )


@pytest.mark.parametrize(
    ("common", "tree", "options"),
    [
        ({}, 0, {}),
        ({}, 7, {"ahead": True, "slots": 2}),
        ({**SAMPLED, "accept": "coupled"}, 7, {}),
        ({**SAMPLED, "accept": "match"}, 0, {"ahead": True, "slots": 2}),
    ],
    ids=str,
)
def test_drafts_change_nothing_in_either_loop(common, tree, options):
    target, drafter = make_target("llama"), random_drafter()
    params = params_of(common)
    expected = reference(target, params)
    assert ends_where_it_may(expected)
    assert reference(target, params, opened(drafter).with_tree(tree)) == expected
    engine = make_engine(target, drafter, tree=tree, **options)
    if not tree:  # drafts that are accepted
        script(engine, expected)
    found, outputs = on_engine(engine, params)
    assert found == expected
    assert tree or max(output.accepted for output in outputs) > 2
    assert on_engine(make_engine(target, None), params)[0] == expected


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_drafts_keep_to_them_too(rule):
    """Engine and reference loop draw the same, and what is banned has no chance with either."""
    target, drafter = make_target("llama"), random_drafter()
    params = params_of({**SAMPLED, "accept": rule})
    expected = reference(target, params, opened(drafter))
    assert ends_where_it_may(expected)
    found, _ = on_engine(make_engine(target, drafter), params)
    assert found == expected


def test_who_takes_the_slot_of_one_with_a_bias_has_none():
    target = make_target("llama")
    params = params_of({})
    expected = reference(target, params)
    engine = make_engine(target, None, slots=1)
    sequences = make_requests(PROMPTS, params=params, eos=ENDS)
    for each in (4, 3, 2):  # forced, held back, free
        engine.add_request(sequences[each])
    finish(engine)
    assert [sequences[each].output for each in (4, 3, 2)] == [expected[each] for each in (4, 3, 2)]


def test_hooked_sequences_have_biases_and_minimum_lengths():
    target = make_target("llama")
    last = VOCAB - 1
    wanted = torch.zeros(VOCAB).index_fill(0, torch.tensor([last]), 50.0)

    def hook(_prompt, _output, logits):
        return logits + wanted

    params = [
        SamplingParams(max_new_tokens=6, hooks=(hook,), stop_token_ids=(last,), **own)
        for own in ({"min_tokens": 3}, {"logit_bias": {last: -100}}, {})
    ]
    prompts = PROMPTS[:3]
    made = [make_requests(prompts, params=params, eos=(last,)) for _ in range(2)]
    list(decode(target, None, made[0]))
    list(make_engine(target, random_drafter()).stream(made[1]))
    assert [each.output for each in made[1]] == [each.output for each in made[0]]
    held_back, banned, free = (each.output for each in made[1])
    assert free == [last]
    assert held_back.index(last) == 3
    assert last not in banned


def test_nothing_is_kept_where_no_sequence_asks():
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    on_engine(engine, [SamplingParams(max_new_tokens=2)] * len(PROMPTS))
    assert engine.slots._biases is None
    plans = [Plan.of([SamplingParams(), SamplingParams(**own)], 7, alone=False) for own in EACH]
    assert [plan.biased for plan in plans] == [True, True, False, True, True]
    assert [plan.kinds for plan in plans[:3]] == [("penalised",), ("penalised",), ()]


def test_what_makes_no_sense_is_refused():
    engine = make_engine(make_target("llama"), None)
    for params, words in (
        ({"logit_bias": {VOCAB: 1.0}}, "outside the vocabulary"),
        ({"stop_token_ids": (VOCAB,)}, "outside the vocabulary"),
        ({"min_tokens": 2, "stop_token_ids": range(VOCAB)}, "every token"),
    ):
        (sequence,) = make_requests([[1, 2]], max_new_tokens=4, **params)
        with pytest.raises(InputError, match=words):
            engine.add_request(sequence)
