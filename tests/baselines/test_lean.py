"""The baselines on the engine: what they draft and what comes out is the reference loop's."""

import copy
import itertools

import pytest
import torch

from domino_spec.baselines import PromptLookup
from domino_spec.baselines.lean import BaselineSource
from domino_spec.baselines.lean_lookup import LookupSource
from domino_spec.baselines.registry import baseline_proposer
from domino_spec.decoding import NoDrafts, SamplingParams
from domino_spec.engine.calibration import adapt_depth
from domino_spec.engine.checks import check_settings
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.sampling import Draws
from domino_spec.errors import ConfigError, InputError, MismatchError
from tests.engine.runs import finish, own, run_engine
from tests.support.baselines import knowing_eagle3, knowing_medusa, random_baseline
from tests.support.families import make_target, plain_greedy, random_prompts
from tests.support.pair import bigram_target
from tests.support.runs import make_sequences, run

KINDS = ("medusa", "eagle3", "lookup")
NEW = 14
DEPTH = 5
# Text that repeats itself, so that lookup finds something.
PROMPTS = [prompt + prompt[:2] for prompt in random_prompts([5, 9, 1])]


def source_of(kind, drafter=None):
    return LookupSource(depth=DEPTH) if kind == "lookup" else BaselineSource(drafter)


def pair_of(kind, **changes):
    """What the engine runs, and what makes the reference loop's proposer over a target."""
    if kind == "lookup":
        return source_of(kind), lambda _target: PromptLookup(depth=DEPTH)
    drafter = random_baseline(kind, **changes)
    source = source_of(kind, copy.deepcopy(drafter))
    return source, lambda target: baseline_proposer(drafter, target, depth=DEPTH)


def make_engine(target, source, **options):
    return Engine(own(target), source, **{"slots": 5, "capacity": 96, "depth": DEPTH, **options})


def watched(proposer):
    """The proposer, and where its blocks stood: tokens before the anchor, anchor, drafts."""
    blocks, plain = set(), proposer.propose

    def propose(rows, depth):
        made = plain(rows, depth)
        for row, drafts in zip(rows, made.tokens.tolist(), strict=True):
            blocks.add((len(row.prompt) + len(row.output) - 1, row.anchor, *drafts))
        return made

    proposer.propose = propose
    return proposer, blocks


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_tokens_and_drafts_are_the_reference_loops(family, kind):
    target = make_target(family)
    source, make = pair_of(kind)
    proposer, expected = watched(make(target))
    answers, stats = run(target, proposer, PROMPTS, max_new_tokens=NEW)
    found, counts, blocks = run_engine(make_engine(target, source), PROMPTS, max_new_tokens=NEW)
    assert found == answers
    # The reference loop drafts less at a row's end.
    assert len(expected) > 20
    assert all(any(b[: len(e)] == e for b in blocks) for e in expected)
    assert (counts.committed, counts.cycles) == (stats.rows.committed, stats.rows.cycles)


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_lookup_finds_what_the_reference_finds(longest):
    """Cycles end elsewhere, for a row that finds little is filled up; so each block by itself."""
    target, lengths = make_target("llama"), set()
    for prompt in ([3] * 9, [1, 2, 3, 1, 2, 4, 1, 2], *PROMPTS):
        source = LookupSource(depth=DEPTH, longest=longest)
        engine = make_engine(target, source, slots=1)
        (answer,), _, blocks = run_engine(engine, [prompt], max_new_tokens=NEW)
        assert answer == plain_greedy(target.model, prompt, NEW)
        for place, anchor, *drafts in blocks:
            text = [*prompt, *answer][: place + 1]
            if len(text) <= place or text[-1] != anchor:
                continue  # behind the answer's end
            looked = PromptLookup(depth=DEPTH, longest=longest)
            (sequence,) = make_sequences([text[:-1]], SamplingParams(max_new_tokens=1))
            sequence.output.append(anchor)
            (found,) = looked.propose([sequence], DEPTH).tokens.tolist()
            lengths.add(len(found))
            assert drafts == found + [anchor] * (DEPTH - len(found))
    assert len(lengths) > 2, "the test is blind"


@pytest.mark.parametrize("options", [
    {"slots": 2, "ahead": True}, {"depth": 2, "pack": False}, {"depth": 0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_slots_depths_and_cycles_ahead_change_nothing(kind, options):
    target = make_target("qwen3")
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    engine = make_engine(target, pair_of(kind)[0], **options)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_sampling_gives_the_text_of_plain_decoding(kind):
    target = make_target("llama")
    options = {"max_new_tokens": NEW, "temperature": 1.3, "top_k": 20, "accept": "coupled"}
    plain, _ = run(target, NoDrafts(), PROMPTS, seed=0, **options)
    reduced = {} if kind == "lookup" else {"draft_vocab_size": 30}
    for changes in ({}, reduced):
        source, make = pair_of(kind, **changes)
        proposer, expected = watched(make(target))
        assert run(target, proposer, PROMPTS, seed=0, **options)[0] == plain
        engine = make_engine(target, source)
        found, _, blocks = run_engine(engine, PROMPTS, seeds=list(range(len(PROMPTS))), **options)
        assert found == plain
        if kind != "lookup":
            assert all(any(b[: len(e)] == e for b in blocks) for e in expected)


def knowing(kind, drafts=4):
    drafter = knowing_medusa(heads=drafts) if kind == "medusa" else knowing_eagle3(unrolled=drafts)
    return source_of(kind, drafter)


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
        return next(self._next)

    def observe(self, accepted, depth, *, sampled):
        assert accepted == depth, "a draft was refused"
        assert not sampled


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_cycles_without_drafts_leave_no_hole(kind):
    target = bigram_target()
    engine = Engine(own(target), knowing(kind), slots=2, capacity=128)
    engine.policy = Turns(2, 0, 0, 4, 0, 1)
    (sequence,) = added(engine, [[7, 3, 8]], new=61)
    finish(engine)
    assert sequence.output == plain_greedy(target.model, [7, 3, 8], 61)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "lookup"])
def test_a_row_may_begin_behind_anothers_text(kind):
    target = bigram_target()
    source = source_of(kind) if kind == "lookup" else knowing(kind)
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
    engine = make_engine(target, pair_of(kind)[0], slots=2)
    assert adapt_depth(engine) is not None
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_caches_may_be_resized(kind):
    target = make_target("llama")
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in PROMPTS]
    engine = make_engine(target, pair_of(kind)[0], slots=2)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers
    before = engine.drafter.cache.nbytes
    engine.resize(slots=4, capacity=64)
    assert before != engine.drafter.cache.nbytes > 0
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_cycle_can_be_timed(kind):
    bench = Bench(make_engine(make_target("llama"), pair_of(kind)[0]), context=20)
    names = [stage.name for stage in bench.stages(2, DEPTH)]
    assert names == ["draft", "verify", "logits and choice", "context for the drafter"]


def test_drafts_of_a_reduced_vocabulary_meet_their_own_tokens_noise():
    """Else they agree with the target only by chance."""
    logits, starts = torch.zeros(2, 3, 8), torch.tensor([4, 9])
    draws = Draws(temperature=torch.ones(2), seeds=torch.tensor([1, 2]))
    tokens = torch.tensor([5, 3, 30, 11, 2, 40, 8, 21])
    whole = torch.full((2, 3, 50), -torch.inf)
    whole[..., tokens] = logits
    found = draws.choose(logits, starts, tokens, cut=False)
    assert torch.equal(found, draws.choose(whole, starts))
    assert len(set(found.flatten().tolist())) > 2


def test_a_layer_is_tapped_once():
    with pytest.raises(ConfigError, match="each once"):
        random_baseline("eagle3", tapped_layers=(0, 2, 2))


def test_what_does_not_fit_is_refused():
    target = make_target("llama")
    with pytest.raises(InputError, match="0 to 5 drafts"):
        make_engine(target, pair_of("medusa")[0], depth=6)
    with pytest.raises(InputError, match="candidates are block drafters'"):
        make_engine(target, pair_of("eagle3")[0], candidates=4)
    with pytest.raises(MismatchError, match="hidden size"):
        make_engine(target, BaselineSource(random_baseline("medusa", hidden_size=16)))
    assert make_engine(target, pair_of("eagle3")[0], depth=9).depth == 9
    narrow = BaselineSource(random_baseline("eagle3"))
    assert "8 wide" in narrow.why_not(torch.device("cuda"))
    assert narrow.why_not(torch.device("cpu")) is None
    unset = dict.fromkeys(("slots", "capacity", "depth", "candidates", "graphs", "chunk"))
    with pytest.raises(MismatchError, match="8 wide"):
        check_settings(narrow, torch.device("cuda"), **unset)


@pytest.mark.parametrize("spare_holds", [0, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_fill_up_a_batch_touch_nobody(kind, spare_holds):
    """They run in the spare slot, which is empty, or past its end where cycles are measured."""
    target, source = make_target("llama"), pair_of(kind)[0]
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


def _free_slot(source):
    """What lies in slot 2, which nobody has taken."""
    cache = source.cache
    if not hasattr(cache, "keys"):
        return [cache.of(torch.tensor([2]))]
    parts = [part.of(torch.tensor([2])) for part in (cache.features, cache.tokens)]
    return [*(states[:, 2].clone() for states in cache.keys.layers), *parts]
