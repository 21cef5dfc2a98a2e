"""Logits hooks and processors on the engine: the reference loop's text, whatever is drafted."""

from functools import cache

import pytest
import torch
import transformers as tf

from domino_spec.decoding import SamplingParams, decode
from domino_spec.engine import model_runner
from domino_spec.engine.model_runner import ModelRunner, Plan
from domino_spec.errors import InputError
from tests.engine.replays import Replays
from tests.engine.runs import finish, make_engine, make_requests
from tests.engine.stress import disturbed_target, drafter_for, table_for
from tests.support.hooks import HOOKS, Grammar, ban_by_prefix
from tests.support.pair import SIZE

PROMPTS = [[5, 9, 30], [1, 2, 3, 1, 2, 3, 1], [8], [20, 21, 22, 23, 20, 21]]
NEW = 14
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "accept": "coupled"}


class Recorder(tf.LogitsProcessor):
    """Stateful: its bias depends on every call so far, so one call too many changes the output."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores[:, (7 * len(self.seen) + int(input_ids[0, -1])) % SIZE] += 2.0
        return scores


@cache
def case(kind):
    """Engines work on copies."""
    table = table_for(kind, SIZE)
    return disturbed_target(table, disturbance=0.3), drafter_for(kind, table)


def reference(target, each, *, eos=()):
    sequences = make_requests(PROMPTS, params=each, eos=eos)
    for _ in decode(target, None, sequences):
        pass
    return [sequence.output for sequence in sequences]


def params_of(*each, **common):
    return [SamplingParams(max_new_tokens=NEW, **common, **own) for own in each]


@pytest.mark.parametrize(("kind", "ahead", "common", "hook"), [
    *(("domino", True, {}, hook) for hook in HOOKS),
    *(("lookup", False, SAMPLED, hook) for hook in HOOKS),
    ("domino", True, SAMPLED, "grammar"),
    ("lookup", False, {}, "grammar"),
])  # fmt: skip
def test_hooks_give_the_reference_loops_text_and_disturb_no_other(kind, ahead, common, hook):
    target, drafter = case(kind)
    hooked = {"hooks": HOOKS[hook]}
    params = params_of(
        hooked, {}, {**hooked, "frequency_penalty": 0.4, "logprobs": 2}, {}, **common
    )
    eos = range(0, SIZE, 3) if hook == "min" else ()
    engine = make_engine(target, drafter, slots=3, ahead=ahead, reuse=True)
    sequences = make_requests(PROMPTS, params=params, eos=eos)
    outputs = list(engine.stream(sequences))
    expected = reference(target, params, eos=eos)
    assert [sequence.output for sequence in sequences] == expected
    free = reference(target, params_of({}, {}, {"frequency_penalty": 0.4}, {}, **common), eos=eos)
    assert [one == other for one, other in zip(expected, free, strict=True)] == [0, 1, 0, 1]
    scores = [score for o in outputs if o.sequence is sequences[2] for score in o.scores]
    assert len(scores) == len(expected[2])


@pytest.mark.parametrize("kind", ["domino", "lookup"])
def test_drafts_are_accepted_and_rejected_under_a_hook(kind):
    target, drafter = case(kind)
    engine = make_engine(target, drafter, slots=4)
    sequences = make_requests(PROMPTS, params=params_of(*[{"hooks": ban_by_prefix}] * 4))
    list(engine.stream(sequences))
    counts = [(sum(s.stats.accepted), sum(s.stats.offered)) for s in sequences]
    assert 0 < sum(a for a, _ in counts) < sum(o for _, o in counts)


@pytest.mark.parametrize("common", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_a_stateful_processor_sees_each_committed_position_once(common):
    target, drafter = case("domino")
    first, second = Recorder(), Recorder()
    params = params_of({"processors": first}, {}, {"processors": second}, {}, **common)
    eos = range(0, SIZE, 7)
    engine = make_engine(target, drafter, slots=4)
    sequences = make_requests(PROMPTS, params=params, eos=eos)
    list(engine.stream(sequences))
    for recorder, sequence in ((first, sequences[0]), (second, sequences[2])):
        answer = sequence.output
        assert recorder.seen == [sequence.prompt + answer[:n] for n in range(len(answer))]
        recorder.seen.clear()
    assert [sequence.output for sequence in sequences] == reference(target, params, eos=eos)


def test_sequences_of_one_call_do_not_share_a_processors_state():
    target, drafter = case("domino")
    params = SamplingParams(max_new_tokens=NEW, processors=Recorder())
    found = make_engine(target, drafter).generate(PROMPTS, params)
    own = [SamplingParams(max_new_tokens=NEW, processors=Recorder()) for _ in PROMPTS]
    assert [sequence.output for sequence in found] == reference(target, own)


def test_sequences_without_hooks_keep_their_own_cycles(monkeypatch):
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4)
    plans, start = [], engine.runner.start_cycle

    def started(slots, plan):
        plans.append((len(slots), plan))
        return start(slots, plan)

    monkeypatch.setattr(engine.runner, "start_cycle", started)
    list(
        engine.stream(
            make_requests(PROMPTS, params=params_of({"hooks": ban_by_prefix}, {}, {}, {}))
        )
    )
    assert plans[0] == (3, Plan(engine.depth))
    assert not any(plan.hooked for _, plan in plans)


@pytest.mark.parametrize("common", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_captured_forwards_are_chosen_from_by_the_host(monkeypatch, common):
    """A graph fills up its batch, and its results lie where another one's do."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(model_runner, "_read_back", lambda report, n: report[:n].clone().cpu)
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4)
    engine.runner = ModelRunner(engine.target, engine.drafter, engine.slots, graphs=True, pad=False)
    engine.runner.recorder = Replays()
    hooked = {"hooks": Grammar()}
    params = params_of(hooked, {}, hooked, {**hooked, "repetition_penalty": 1.3}, **common)
    engine.capture(4, params[0])
    captured = set(engine.runner._cycles)
    assert {(size, plan.hooked) for size, plan in captured} == {(1, True), (2, True), (4, True)}
    sequences = make_requests(PROMPTS, params=params)
    list(engine.stream(sequences))
    assert [sequence.output for sequence in sequences] == reference(target, params)


# What goes wrong ----------------------------------------------------------------------------------


def troubled(place):
    def careless(_prompt, output, logits):
        if len(output) == place:
            raise KeyError("state 3")
        return logits

    return careless


def nothing_after(place):
    def mask(_prompt, output, logits):
        return logits.fill_(-torch.inf) if len(output) >= place else logits

    return mask


def wrong_shape(_prompt, _output, logits):
    return logits[:3]


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize(("hook", "words"), [
    (troubled, "the logits hook careless at position {} raised KeyError: 'state 3'"),
    (nothing_after, "no token is left at position {}: the logits processors and hooks ban all"),
])  # fmt: skip
@pytest.mark.parametrize("common", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_a_hook_that_fails_ends_its_sequence_alone(hook, words, place, common):
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=2)
    params = params_of({"hooks": hook(place)}, {}, {"hooks": ban_by_prefix}, {}, **common)
    sequences = make_requests(PROMPTS, params=params)
    outputs = list(engine.stream(sequences))
    expected = reference(target, params_of({}, {}, {"hooks": ban_by_prefix}, {}, **common))
    failed = sequences[0]
    assert isinstance(failed.error, InputError)
    assert words.format(len(PROMPTS[0]) + place) in str(failed.error)
    assert failed.output == expected[0][:place]
    told = [token for o in outputs if o.sequence is failed for token in o.tokens]
    assert told == failed.output
    assert [s.output for s in sequences[1:]] == expected[1:]
    assert [s.error for s in sequences[1:]] == [None] * 3
    assert not engine.busy
    with pytest.raises(InputError, match=words.format(len(PROMPTS[0]) + place)):
        reference(target, params)


def test_a_hook_that_would_fail_after_the_end_is_not_asked():
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4)
    params = params_of(*[{"hooks": troubled(NEW)}] * 4)
    sequences = make_requests(PROMPTS, params=params)
    finish_all = list(engine.stream(sequences))
    assert [output.error for output in finish_all] == [None] * len(finish_all)
    assert [len(sequence.output) for sequence in sequences] == [NEW] * 4


def test_logits_of_another_shape_are_refused():
    target, _ = case("domino")
    engine = make_engine(target, None, slots=1)
    (sequence,) = make_requests(PROMPTS[:1], max_new_tokens=3, hooks=wrong_shape)
    engine.add_request(sequence)
    (output,) = finish(engine)
    assert r"wrong_shape at position 3 gave [3]; expected logits [40]" in str(output.error)
    with pytest.raises(InputError, match="hooks holds 3; expected logits hooks"):
        SamplingParams(hooks=[3])
