"""The engine does what the reference loop does, token by token, on a CPU in float32."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from domino_spec.decoding import RunStats, SamplingParams
from domino_spec.errors import InputError
from tests.engine.runs import (
    finish,
    make_engine,
    make_requests,
    run_engine,
    run_reference,
)
from tests.support.families import (
    drafter_config,
    make_target,
    markov_head,
    random_drafter,
    random_prompts,
)
from tests.support.pair import SIZE, bigram_target, knowing_drafter, successor
from tests.support.runs import make_sequences

PROMPTS = random_prompts([3, 1, 9, 5, 14])
NEW = 14
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
        target, drafter, prompts, depth=depth, candidates=candidates, eos=eos, max_new_tokens=NEW
    )
    engine = make_engine(target, drafter, depth=depth, candidates=candidates, **options)
    found, own_counts, own_blocks = run_engine(engine, prompts, eos=eos, max_new_tokens=NEW)
    assert found == expected
    assert (own_counts.committed, own_counts.cycles) == (counts.committed, counts.cycles)
    return own_blocks, blocks


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("qwen3", kind) for kind in DRAFTERS),
        ("llama", "sliding"),
    ],
)
def test_tokens_and_drafts_are_the_reference_loops(family, kind):
    drafter = random_drafter(drafter_config(**DRAFTERS[kind]))
    found, expected = compare(make_target(family), drafter)
    # The reference loop drafts less at a sequence's end.
    assert len(found) >= len(expected) > 20
    assert all(any(b[: len(e)] == e for b in found) for e in expected)


@pytest.mark.parametrize("options", [
    {"slots": 1}, {"slots": 2}, {"slots": 8}, {"ahead": True}, {"slots": 2, "ahead": True},
    {"depth": 3}, {"depth": 8}, {"candidates": 4},
], ids=str)  # fmt: skip
def test_slots_depths_and_cycles_ahead_change_nothing(options):
    drafter = random_drafter()
    compare(make_target("qwen3"), drafter, **options)


def test_sequences_stop_at_the_end_token():
    target = make_target("llama")
    drafter = random_drafter()
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
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


@pytest.mark.parametrize("params", [SAMPLED[0], SAMPLED[3]], ids=str)
def test_a_seed_gives_the_same_text_with_a_drafter_and_without(params):
    target, prompts = make_target("qwen3"), PROMPTS[:3]
    seeds = [3, 1 << 40, 5]
    common = {"seeds": seeds, "max_new_tokens": NEW, **params}
    plain, _, _ = run_engine(make_engine(target, None), prompts, **common)
    drafted, _, _ = run_engine(make_engine(target, random_drafter()), prompts, **common)
    alone, _, _ = run_engine(make_engine(target, random_drafter(), slots=1), prompts, **common)
    assert plain == drafted == alone
    other, _, _ = run_engine(
        make_engine(target, None), prompts, **common | {"seeds": [seed + 1 for seed in seeds]}
    )
    assert other != plain


@pytest.mark.parametrize(
    ("params", "candidates"), [*zip(SAMPLED, [None, 8, None, 8], strict=True)], ids=str
)
def test_sampled_tokens_and_drafts_are_the_reference_loops(params, candidates):
    """Coupled draws are the same numbers everywhere: exactness can be told token by token."""
    target, drafter = make_target("qwen3"), random_drafter(drafter_config(draft_vocab_size=40))
    expected, counts, blocks = run_reference(
        target, drafter, PROMPTS, depth=None, candidates=candidates, max_new_tokens=NEW, seed=11,
        accept="coupled", **params,
    )  # fmt: skip
    engine = make_engine(target, drafter, candidates=candidates)
    seeds = [11 + row for row in range(len(PROMPTS))]
    found, own_counts, own_blocks = run_engine(
        engine, PROMPTS, seeds=seeds, max_new_tokens=NEW, **params
    )
    assert found == expected
    assert own_counts.cycles == counts.cycles
    assert all(any(b[: len(e)] == e for b in own_blocks) for e in blocks)


def test_each_sequence_samples_by_its_own_parameters():
    target = make_target("llama")
    each = [SamplingParams(max_new_tokens=NEW, **p) for p in ({}, *SAMPLED)]
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
    engine = make_engine(target, random_drafter(drafter_config(prefix=0)), slots=100, capacity=16)
    draws = 1500
    params = {"max_new_tokens": 2, "temperature": 1.0, "top_k": 6}
    answers, _, _ = run_engine(engine, [[5, 9]] * draws, seeds=list(range(draws)), **params)
    first = max({a[0] for a in answers}, key=[a[0] for a in answers].count)
    seconds = [a[1] for a in answers if a[0] == first]
    with torch.no_grad():
        logits = target.model(torch.tensor([[5, 9, first]])).logits[0, -1]
    values, tokens = logits.topk(6)
    expected = values.softmax(-1) * len(seconds)
    counts = torch.tensor([seconds.count(token) for token in tokens.tolist()])
    assert counts.sum() == len(seconds) > 150
    large = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[large].sum()
    assert statistic < 20.5  # 5 degrees of freedom: beyond it once in a thousand


# Sequences come and go ----------------------------------------------------------------------------


def test_a_sequence_added_later_gets_the_same_text():
    target = make_target("qwen3")
    engine = make_engine(target, random_drafter(), slots=2)
    first, second = make_requests(PROMPTS[:2], max_new_tokens=NEW)
    engine.add_request(first)
    for _ in range(3):
        engine.step()
    engine.add_request(second)
    finish(engine)
    expected, _, _ = run_reference(target, None, PROMPTS[:2], max_new_tokens=NEW)
    assert [first.output, second.output] == expected


def test_an_aborted_sequence_frees_its_slot_and_disturbs_no_other():
    target = make_target("qwen3")
    engine = make_engine(target, random_drafter(), slots=2, ahead=True)
    sequences = make_requests(PROMPTS[:3], max_new_tokens=NEW)
    for sequence in sequences:
        engine.add_request(sequence)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    engine.abort(sequences[0])
    before = list(sequences[0].output)
    finish(engine)
    expected, _, _ = run_reference(target, None, PROMPTS[:3], max_new_tokens=NEW)
    assert [sequences[1].output, sequences[2].output] == expected[1:]
    assert (sequences[0].finish_reason, sequences[0].output) == ("abort", before)


def test_generate_gives_a_sequence_for_each_prompt():
    target = make_target("llama")
    engine = make_engine(target, random_drafter())
    params = [SamplingParams(max_new_tokens=count) for count in (NEW, 3, 1, 8, NEW)]
    found = engine.generate(PROMPTS, params)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert [each.output for each in found] == [
        answer[: own.max_new_tokens] for answer, own in zip(expected, params, strict=True)
    ]
    plain = engine.generate(PROMPTS, params[0], eos={expected[0][4]}, speculate=False)
    assert plain[0].output == expected[0][: expected[0].index(expected[0][4]) + 1]
    assert all(each.stats.drafted == 0 for each in plain)


# Sequences with drafts and without run together ---------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "accept": "coupled"}], ids=str)
def test_sequences_with_and_without_drafts_in_one_batch(params, ahead):
    target, drafter = make_target("llama"), random_drafter()
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW, seed=4, **params)
    engine = make_engine(target, drafter, ahead=ahead)
    sequences = make_requests(PROMPTS, max_new_tokens=NEW, seed=4, **params)
    for sequence in sequences[::2]:
        sequence.speculate = False
    list(engine.stream(sequences))
    assert [sequence.output for sequence in sequences] == expected
    for sequence in sequences:
        assert (sequence.stats.drafted > 0) is sequence.speculate
        if not sequence.speculate:
            assert sequence.cycles == NEW - 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_without_drafts_causes_no_drafter_work(ahead, monkeypatch):
    """No cache update, no proposal, no write for it, also next to a sequence with drafts."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, ahead=ahead)
    update, propose, touched = engine.drafter.update_cache, engine.drafter.propose, set()

    def updated(*states, slots, **rest):
        touched.update(slots.tolist())
        return update(*states, slots=slots, **rest)

    def proposed(anchors, *, slots, **rest):
        touched.update(slots.tolist())
        return propose(anchors, slots=slots, **rest)

    monkeypatch.setattr(engine.drafter, "update_cache", updated)
    monkeypatch.setattr(engine.drafter, "propose", proposed)
    plain, other, drafting = make_requests(PROMPTS[:3], max_new_tokens=NEW)
    plain.speculate = other.speculate = False
    engine.add_request(plain)
    engine.add_request(other)
    finish(engine)
    assert touched == set()
    plain, drafting = make_requests([PROMPTS[2], PROMPTS[3]], max_new_tokens=NEW)
    plain.speculate = False
    engine.add_request(plain)
    engine.add_request(drafting)
    engine.step()
    slots = plain.slot, drafting.slot
    finish(engine)
    assert touched == {slots[1]}
    assert slots[0] != slots[1]


# Requests that are refused, and sequences that fail -----------------------------------------------


@pytest.mark.parametrize("slots", [1, None])
def test_a_sequence_longer_than_a_slot_is_refused(slots):
    engine = make_engine(make_target("llama"), None, slots=slots, capacity=26)
    (long,) = make_requests([[4] * 13], max_new_tokens=NEW)
    with pytest.raises(InputError, match="needs 27 tokens .* a slot holds 26"):
        engine.add_request(long)
    assert not engine.busy


def test_a_sequence_is_added_once():
    engine = make_engine(make_target("llama"), None, slots=1)
    first, second = make_requests(PROMPTS[:2], max_new_tokens=NEW)
    for sequence in (first, second):
        engine.add_request(sequence)
        with pytest.raises(InputError, match="in an engine already"):
            engine.add_request(sequence)
    engine.step()
    with pytest.raises(InputError, match="already"):
        engine.add_request(first)
    finish(engine)
    with pytest.raises(InputError, match="14 tokens already; the engine begins with a prompt"):
        engine.add_request(first)


def failing_at(count):
    def rule(sequence):
        if len(sequence.output) == count:
            raise RuntimeError(f"a stop rule of sequence {sequence.index}")

    return rule


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_a_stop_rule_that_fails_ends_its_own_sequence_alone(count, ahead):
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=3, ahead=ahead)
    sequences = make_requests(PROMPTS[:3], max_new_tokens=NEW)
    sequences[1].stop_rules = [failing_at(count)]
    outputs = list(engine.stream(sequences))
    (failed,) = (output for output in outputs if output.error is not None)
    assert failed.sequence is sequences[1]
    assert str(failed.error) == "a stop rule of sequence 1"
    assert sequences[1].error is failed.error
    expected, _, _ = run_reference(target, None, PROMPTS[:3], max_new_tokens=NEW)
    assert [sequences[0].output, sequences[2].output] == [expected[0], expected[2]]
    assert sequences[1].output == expected[1][:count]
    assert (engine.running, engine.busy) == (0, False)


@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_step_that_failed_the_engine_begins_anew(ahead, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=1, ahead=ahead, reuse=True)
    lost, waiting = make_requests(PROMPTS[:2], max_new_tokens=NEW)
    for sequence in (lost, waiting):
        engine.add_request(sequence)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run_cycle", broken)
        with pytest.raises(ZeroDivisionError) as raised:
            engine.step()
    (output,) = engine.reset(raised.value)
    assert (output.sequence, output.error) == (lost, raised.value)
    assert lost.error is raised.value
    assert (engine.running, engine.waiting) == (0, 1)
    finish(engine)  # those that waited go on
    expected, _, _ = run_reference(target, None, PROMPTS[:2], max_new_tokens=NEW)
    assert waiting.output == expected[1]
    assert run_engine(engine, PROMPTS[:2], max_new_tokens=NEW)[0] == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abandoned_stream_takes_its_sequences_out(ahead):
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=2, ahead=ahead)
    sequences = make_requests(PROMPTS[:3], max_new_tokens=NEW)
    outputs = engine.stream(sequences)
    for _ in range(4):
        next(outputs)
    outputs.close()
    assert (engine.running, engine.waiting, engine.busy) == (0, 0, False)
    assert all(sequence.finished for sequence in sequences)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_ends_the_sequences_of_every_stream(ahead, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=3, ahead=ahead)
    sequences = make_requests(PROMPTS, max_new_tokens=NEW)
    one, other = engine.stream(sequences[:1]), engine.stream(sequences[1:])
    next(one), next(other)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run_cycle", broken)
        with pytest.raises(ZeroDivisionError):
            list(one)
    heard = list(other)
    lost = [output.sequence for output in heard if output.error is not None]
    assert lost == sequences[1:3]  # the others waited
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert [sequence.output for sequence in sequences[3:]] == expected[3:]


@pytest.mark.parametrize("ahead", [False, True])
def test_two_streams_of_one_engine_at_once(ahead):
    """Each yields its own sequences' outputs, whichever of the two makes the steps."""
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=3, ahead=ahead)
    sequences = make_requests(PROMPTS, max_new_tokens=NEW)
    one, other = engine.stream(sequences[:2]), engine.stream(sequences[2:])
    heard = [next(one), next(other), next(one)]
    heard += list(other)
    heard += list(one)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert [sequence.output for sequence in sequences] == expected
    for sequence in sequences:
        mine = [output.tokens for output in heard if output.sequence is sequence]
        assert [token for tokens in mine for token in tokens] == sequence.output


def test_streams_in_two_threads():
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=None, capacity=None)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    with ThreadPoolExecutor(3) as threads:
        found = list(
            threads.map(lambda p: engine.generate([p], SamplingParams(max_new_tokens=NEW)), PROMPTS)
        )
    assert [sequence.output for (sequence,) in found] == expected


def test_a_stream_is_counted_and_timed():
    engine = make_engine(make_target("llama"), random_drafter())
    stats = RunStats()
    sequences = make_sequences(PROMPTS, SamplingParams(max_new_tokens=NEW), run=stats)
    outputs = list(engine.stream(sequences, stats))
    assert stats.engine == "fast"
    assert stats.acceptance.cycles == sum(sequence.stats.cycles for sequence in sequences)
    assert stats.acceptance.committed == sum(len(o.tokens) for o in outputs) - len(sequences)
    assert stats.acceptance.offered[0] == sum(sequence.stats.offered[0] for sequence in sequences)
    assert min(stats.prefill_seconds, stats.whole_seconds) > 0
    assert stats.seconds == stats.prefill_seconds + stats.cycle_seconds
