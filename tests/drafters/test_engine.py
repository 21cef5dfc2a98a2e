"""Medusa, EAGLE-3 and lookup on the engine: drafts and tokens are the reference loop's."""

import copy
import itertools

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.engine.calibration import adapt_depth
from domino_spec.engine.engine import Engine, check_settings
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.policy import Drafts
from domino_spec.engine.sampling import Draws
from domino_spec.errors import ConfigError, InputError, MismatchError
from tests.engine.runs import finish, own, run_engine, run_reference
from tests.support.baselines import knowing_eagle3, knowing_medusa, random_baseline
from tests.support.families import make_target, plain_greedy, random_prompts
from tests.support.pair import bigram_target
from tests.support.runs import make_sequences

KINDS = ("medusa", "eagle3", "lookup")
NEW = 14
DEPTH = 5
# Text that repeats itself, so that lookup finds something.
PROMPTS = [prompt + prompt[:2] for prompt in random_prompts([5, 9, 1])]


def opened(kind, model=None, **changes):
    """A drafter of a kind, of random weights unless a model is given."""
    if kind == "lookup":
        return LookupDrafter(depth=DEPTH)
    return drafter_of(random_baseline(kind, **changes) if model is None else model)


def make_engine(target, drafter, **options):
    return Engine(
        own(target),
        copy.deepcopy(drafter),
        **{"slots": 5, "capacity": 96, "depth": DEPTH, **options},
    )


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_tokens_and_drafts_are_the_reference_loops(family, kind):
    target = make_target(family)
    drafter = opened(kind)
    answers, stats, expected = run_reference(target, drafter, PROMPTS, max_new_tokens=NEW)
    found, counts, blocks = run_engine(
        make_engine(target, opened(kind)), PROMPTS, max_new_tokens=NEW
    )
    assert found == answers
    # The reference loop drafts less at a row's end.
    assert len(expected) > 20
    assert all(any(b[: len(e)] == e for b in blocks) for e in expected)
    assert (counts.committed, counts.cycles) == (stats.committed, stats.cycles)


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_lookup_finds_the_longest_match_and_of_these_the_latest(longest):
    target, lengths = make_target("llama"), set()
    for prompt in ([3] * 9, [1, 2, 3, 1, 2, 4, 1, 2], *PROMPTS):
        engine = make_engine(target, LookupDrafter(depth=DEPTH, longest=longest), slots=1)
        (answer,), _, blocks = run_engine(engine, [prompt], max_new_tokens=NEW)
        assert answer == plain_greedy(target.model, prompt, NEW)
        for place, anchor, *drafts in blocks:
            text = [*prompt, *answer][: place + 1]
            if len(text) <= place or text[-1] != anchor:
                continue  # after the answer's end
            found = looked_up(text, longest)
            lengths.add(len(found))
            assert drafts == found + [anchor] * (DEPTH - len(found))
    assert len(lengths) > 2, "the test is blind"


def looked_up(text, longest):
    """What a plain search finds."""
    for length in range(min(longest, len(text)), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return text[end : end + DEPTH]
    return []


@pytest.mark.parametrize("options", [
    {"slots": 2, "ahead": True}, {"depth": 2}, {"depth": 0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_slots_depths_and_cycles_ahead_change_nothing(kind, options):
    target = make_target("qwen3")
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    engine = make_engine(target, opened(kind), **options)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_sampling_gives_the_text_of_plain_decoding(kind):
    target = make_target("llama")
    options = {"max_new_tokens": NEW, "temperature": 1.3, "top_k": 20, "accept": "coupled"}
    plain, _, _ = run_reference(target, None, PROMPTS, seed=0, **options)
    reduced = {} if kind == "lookup" else {"draft_vocab_size": 30}
    for changes in ({}, reduced):
        drafter = opened(kind, **changes)
        engine = make_engine(target, drafter)
        found, _, expected = run_reference(target, drafter, PROMPTS, seed=0, **options)
        assert found == plain
        found, _, blocks = run_engine(engine, PROMPTS, seeds=list(range(len(PROMPTS))), **options)
        assert found == plain
        if kind != "lookup":
            assert all(any(b[: len(e)] == e for b in blocks) for e in expected)


def knowing(kind, drafts=4):
    drafter = knowing_medusa(heads=drafts) if kind == "medusa" else knowing_eagle3(unrolled=drafts)
    return drafter_of(drafter)


def added(engine, prompts, *, new=31):
    """Sequences that the engine has from now on."""
    sequences = make_sequences(prompts, SamplingParams(max_new_tokens=new))
    return [engine.add_request(sequence) for sequence in sequences]


@pytest.mark.parametrize(("ahead", "chunk"), [(False, 2048), (True, 2048), (True, 1), (True, 2)])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_drafter_that_knows_the_target_is_always_accepted(kind, ahead, chunk):
    """Any misalignment of states, tokens and drafts would make it fail."""
    target = bigram_target()
    engine = Engine(own(target), knowing(kind), slots=3, capacity=96, ahead=ahead, chunk=chunk)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]]
    sequences = added(engine, prompts[:1])
    engine.step()  # it decodes while the other prompts are computed, in chunks
    sequences += added(engine, prompts[1:])
    finish(engine)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == plain_greedy(target.model, prompt, 31)
        assert sequence.stats.accepted == sequence.stats.offered
        assert sequence.stats.tokens_per_cycle == 5


class Turns:
    """Some cycles draft, some do not."""

    def __init__(self, *depths):
        self._next = itertools.cycle(depths)

    def choose(self, _batch):
        return Drafts(next(self._next))

    def record(self, accepted, depth, *, sampled):
        assert accepted == depth, "a draft was refused"
        assert not sampled

    def observe(self, batch, drafts, seconds):
        """Costs change nothing here."""


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_cycles_without_drafts_leave_no_hole(kind):
    target = bigram_target()
    engine = Engine(own(target), knowing(kind), slots=2, capacity=128)
    engine.policy = Turns(2, 0, 0, 4, 0, 1)
    (sequence,) = added(engine, [[7, 3, 8]], new=61)
    finish(engine)
    assert sequence.output == plain_greedy(target.model, [7, 3, 8], 61)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "lookup"])
def test_a_sequence_may_begin_after_anothers_text(kind):
    target = bigram_target()
    source = opened(kind) if kind == "lookup" else knowing(kind)
    engine = Engine(own(target), source, slots=2, capacity=96, reuse=True)
    text = [5, 1, 8, 2, 9, 4, 4, 1]
    sequences = added(engine, [text])
    engine.step()
    sequences += added(engine, [[*text[:6], 11]])
    finish(engine)
    assert [sequence.cached for sequence in sequences] == [0, 6]
    for sequence in sequences:
        assert sequence.output == plain_greedy(target.model, sequence.prompt, 31)
        if kind != "lookup":
            assert sequence.stats.accepted == sequence.stats.offered


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_may_choose_its_depth(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = make_target("llama")
    engine = make_engine(target, opened(kind), slots=2)
    assert adapt_depth(engine) is not None
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_caches_may_be_resized(kind):
    target = make_target("llama")
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    engine = make_engine(target, opened(kind), slots=2)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers
    before = engine.drafter.cache_bytes
    engine.resize(slots=4, capacity=64)
    assert before != engine.drafter.cache_bytes > 0
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_cycle_can_be_timed(kind):
    bench = Bench(make_engine(make_target("llama"), opened(kind)), context=20)
    names = [stage.name for stage in bench.stages(2, DEPTH)]
    assert names == ["draft", "verify", "logits and choice", "context for the drafter"]


def test_drafts_of_a_reduced_vocabulary_meet_their_own_tokens_noise():
    """Else they agree with the target only by chance."""
    logits, starts = torch.zeros(2, 3, 8), torch.tensor([4, 9])
    draws = Draws(temperature=torch.ones(2), seeds=torch.tensor([1, 2]))
    tokens = torch.tensor([5, 3, 30, 11, 2, 40, 8, 21])
    whole = torch.full((2, 3, 50), -torch.inf)
    whole[..., tokens] = logits
    found = draws.choose_drafts(logits, starts, tokens)
    assert torch.equal(found, draws.choose(whole, starts))
    assert len(set(found.flatten().tolist())) > 2


def test_a_layer_is_captured_once():
    with pytest.raises(ConfigError, match="each once"):
        random_baseline("eagle3", tapped_layers=(0, 2, 2))


def test_what_does_not_fit_is_refused():
    target = make_target("llama")
    with pytest.raises(InputError, match="gives 0 to 5 drafts"):
        make_engine(target, opened("medusa"), depth=6)
    with pytest.raises(MismatchError, match="hidden size"):
        make_engine(target, drafter_of(random_baseline("medusa", hidden_size=16)))
    assert make_engine(target, opened("eagle3"), depth=9).depth == 9
    narrow = drafter_of(random_baseline("eagle3"))
    assert "8 wide" in narrow.unsupported_reason(torch.device("cuda"))
    assert narrow.unsupported_reason(torch.device("cpu")) is None
    unset = dict.fromkeys(("slots", "capacity", "depth", "graphs", "chunk"))
    with pytest.raises(MismatchError, match="8 wide"):
        check_settings(narrow, torch.device("cuda"), **unset)


@pytest.mark.parametrize("spare_holds", [0, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_fill_up_a_batch_touch_nobody(kind, spare_holds):
    """They run in the spare slot, which is empty, or past its end where cycles are measured."""
    target, source = make_target("llama"), opened(kind)
    reports = []
    for filling in ([], [3, 3]):
        engine = make_engine(target, source, slots=3)
        added(engine, PROMPTS[:2], new=NEW)
        engine.step()
        engine.slots.lengths[engine.slots.spare] = spare_holds
        before = _free_slot(engine.drafter)
        for _ in range(3):
            report = engine.runner.run_cycle(torch.tensor([0, 1, *filling]), Plan(DEPTH))
            reports.append(report[:2].tolist())
        assert all(
            torch.equal(a, b) for a, b in zip(before, _free_slot(engine.drafter), strict=True)
        )
    assert reports[:3] == reports[3:]


def _free_slot(drafter):
    """What lies in slot 2, which no sequence has taken."""
    if drafter.kind != "eagle3":
        return [drafter.cache.of(torch.tensor([2]))]
    keys, *parts = drafter.caches
    held = [part.of(torch.tensor([2])) for part in parts]
    return [*(states[:, 2].clone() for states in keys.layers[:2]), *held]
