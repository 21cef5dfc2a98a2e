"""Plain steps leave the draft cache for later; drafts are as if each of them had updated it."""

import itertools
import time

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.engine import model_runner
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import MOST_DEFERRED, Plan
from domino_spec.engine.policy import Drafts
from tests.engine.runs import finish, make_engine, run_engine, watch
from tests.engine.test_engine import DRAFTERS
from tests.support.baselines import random_baseline
from tests.support.families import drafter_config, make_target, random_drafter, random_prompts
from tests.support.runs import make_sequences

FIRST, OTHER, LONG = random_prompts([12, 9, 40])
BLOCKS = ("shift", "sliding", "sliding, causal", "markov")
KINDS = (*BLOCKS, "medusa", "eagle3", "lookup")


def opened(kind):
    if kind == "lookup":
        return LookupDrafter(depth=5)
    if kind in BLOCKS:
        return drafter_of(random_drafter(drafter_config(**DRAFTERS[kind])))
    return drafter_of(random_baseline(kind))


class Turns:
    """Cycles of these depths, and the last one from then on."""

    def __init__(self, *depths):
        self._next = itertools.chain(depths, itertools.repeat(depths[-1]))

    def choose(self, _batch):
        return Drafts(next(self._next))

    def record(self, accepted, depth, *, sampled):
        """Nothing is learnt, ..."""

    def observe(self, batch, drafts, seconds):
        """... of costs neither."""


def pair(drafter, **options):
    """Two engines alike, but that plain steps of the second update the draft cache at once."""
    engines = [make_engine(make_target("qwen3"), drafter, **options) for _ in range(2)]
    engines[1].runner._defers = False
    return engines


def updates(engine, monkeypatch):
    """The tokens of each update of the draft cache from now on."""
    update, seen = engine.drafter.update_cache, []

    def updated(captured, tokens, **places):
        seen.append(tokens.numel())
        update(captured, tokens, **places)

    monkeypatch.setattr(engine.drafter, "update_cache", updated)
    return seen


def decode(engine, prompt, new, *, cycles=None, **options):
    """A sequence decoded to its end, or for some cycles."""
    params = SamplingParams(max_new_tokens=new)
    (sequence,) = make_sequences([prompt], params, **options)
    engine.add_request(sequence)
    while not sequence.finished and (cycles is None or sequence.cycles < cycles):
        engine.step()
    return sequence


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_plain_steps_are_the_same(kind, ahead):
    """Of sequences that come and go, after fewer plain steps than may wait, and after more."""
    prompts, found = random_prompts([3, 1, 9, 5, 14]), []
    for engine in pair(opened(kind), slots=3, ahead=ahead):
        turns = [*[0] * 3, 2, 0, 5, *[0] * (MOST_DEFERRED + 3), 4, 0, 0, 1, *[0] * 7, 3]
        engine.policy = Turns(*turns)
        found.append(run_engine(engine, prompts, max_new_tokens=40))
    deferred, at_once = found
    assert deferred[0] == at_once[0]
    assert deferred[1].cycles == at_once[1].cycles
    assert deferred[2] == at_once[2]
    assert len(deferred[2]) > 20


def test_many_plain_steps_update_the_draft_cache_once(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    engine.policy = Turns(0)
    seen = updates(engine, monkeypatch)
    decode(engine, FIRST, 2 * MOST_DEFERRED + 10)  # of which nine are left waiting
    assert seen == [len(FIRST), MOST_DEFERRED, MOST_DEFERRED]
    seen.clear()
    engine.policy = Turns(0, 0, 0, 2)
    decode(engine, OTHER, 6, cycles=4)
    assert seen == [9, len(OTHER), 3, 3]  # what waited, the prompt, what waited, the drafts


def test_a_slot_may_change_hands():
    """What waited for the sequence before is not written over the next one's prompt."""
    found = []
    for engine in pair(random_drafter(), slots=1):
        engine.policy = Turns(0)
        decode(engine, FIRST, 10)
        engine.policy, blocks = Turns(7), watch(engine)
        found.append((decode(engine, LONG, 14).output, blocks))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["shift", "eagle3", "lookup"])
@pytest.mark.parametrize("first", ["ended", "aborted", "running"])
def test_a_prefix_has_what_plain_steps_captured(first, kind):
    """The next sequence takes its slot over, or copies from it while it runs."""
    found = []
    for engine in pair(opened(kind), slots=2, reuse=True):
        engine.policy = Turns(0)
        sequence = decode(engine, FIRST, 12, cycles=None if first == "ended" else 7)
        if first == "aborted":
            engine.abort(sequence)
        engine.policy, blocks = Turns(0, 5), watch(engine)
        text = FIRST + sequence.output
        again = decode(engine, text + OTHER, 14)
        finish(engine)
        assert again.cached == len(text) - 1
        found.append((sequence.output, again.output, blocks))
    assert found[0] == found[1]


def test_pages_may_change_hands():
    """A page goes to another sequence after all that waited for it was written."""
    found = []
    for engine in pair(random_drafter(), slots=3, page=4, capacity=96, tokens=96, reuse=True):
        engine.policy = Turns(0)
        plain = [decode(engine, prompt, 9) for prompt in (FIRST, OTHER)]
        engine.policy, blocks = Turns(0, 0, 3, 0, 0, 0, 0, 7, 0, 2), watch(engine)
        prompts = [plain[0].prompt + plain[0].output + OTHER, LONG, OTHER + LONG[:3]]
        params = SamplingParams(max_new_tokens=20)
        sequences = make_sequences(prompts, params)
        for sequence in sequences:
            engine.add_request(sequence)
        finish(engine)
        assert sequences[0].cached > len(FIRST)
        found.append(([sequence.output for sequence in sequences], blocks))
    assert found[0] == found[1]


def test_what_plain_steps_deferred_is_no_cost_of_a_cycle_with_drafts(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    engine.policy = policy = Turns(0, 0, 0, 2)
    update, took = engine.drafter.update_cache, []

    def updated(captured, tokens, **places):
        if len(tokens) == 3:
            time.sleep(0.5)
        update(captured, tokens, **places)

    monkeypatch.setattr(engine.drafter, "update_cache", updated)
    monkeypatch.setattr(policy, "observe", lambda _batch, _drafts, seconds: took.append(seconds))
    started = time.perf_counter()
    decode(engine, FIRST, 14, cycles=6)
    assert time.perf_counter() - started > 0.5
    assert len(took) == 4  # the first cycle shares its step with the prompt
    assert all(0 < seconds < 0.5 for seconds in took)


def test_a_plain_step_pays_for_the_update_that_it_makes(monkeypatch):
    """Of as many sequences as fill it up at once, each step makes one."""
    monkeypatch.setattr(model_runner, "MOST_DEFERRED", 1)
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    engine.policy = policy = Turns(0)
    update, took = engine.drafter.update_cache, []

    def updated(captured, tokens, **places):
        time.sleep(0.05)
        update(captured, tokens, **places)

    monkeypatch.setattr(engine.drafter, "update_cache", updated)
    monkeypatch.setattr(policy, "observe", lambda _batch, _drafts, seconds: took.append(seconds))
    decode(engine, FIRST, 6)
    assert took
    assert min(took) > 0.05


def test_a_measured_cycle_does_no_plain_steps_work(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    bench, slots = Bench(engine, context=16), torch.arange(2)
    bench.reset(2)
    engine.runner.run_cycle(slots, Plan(0))
    bench.reset(2)
    seen = updates(engine, monkeypatch)
    engine.runner.run_cycle(slots, Plan(3))
    assert seen == [2 * 4]
