"""Prompts in chunks, several in one forward, padded and replayed: text and drafts do not change."""

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafter.masks import Window
from domino_spec.engine import engine as engine_module
from domino_spec.engine import model_runner
from domino_spec.engine.attention import Spans
from domino_spec.engine.kernels import attention
from domino_spec.engine.kernels.attention import batch_reference
from domino_spec.engine.model_runner import ModelRunner, PromptChunk
from tests.engine.replays import Replays
from tests.engine.runs import finish, make_engine, make_requests, run_engine, run_reference, watch
from tests.support.families import make_target, random_drafter, random_prompts

PROMPTS = random_prompts([1, 15, 16, 17, 40, 70, 100])
SHORT, LONG, OTHER = random_prompts([5, 45, 9])
NEW = 9
LENGTHS = (4, 8, 24, 80)
"""Of padded prompts, for prompts as short as in tests; the last has more tokens than a block."""


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    monkeypatch.setattr(model_runner, "PROMPT_LENGTHS", LENGTHS)
    monkeypatch.setattr(model_runner, "SHARED_LENGTHS", LENGTHS[1:])
    monkeypatch.setattr(engine_module, "_ALONE", 1)  # chunks also where nothing decodes
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def padding(engine, *, recorder=None):
    """The engine computes prompts as on a GPU."""
    engine.runner = ModelRunner(engine.target, engine.drafter, engine.slots, graphs=False, pad=True)
    engine.runner.recorder = recorder
    return engine


def shapes_of(engine):
    """The shapes of the forwards that compute prompts from now on."""
    shapes, plain = [], engine.runner._run_prefill

    def forward(shape, numbers):
        shapes.append((shape.sequences, shape.count))
        return plain(shape, numbers)

    engine.runner._run_prefill = forward
    return shapes


def one_by_one(engine, prompts, **options):
    return [run_engine(engine, [p], **{"max_new_tokens": NEW, **options})[0][0] for p in prompts]


def expected(prompts, family="llama"):
    return run_reference(make_target(family), None, prompts, max_new_tokens=NEW)[0]


# Chunks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "chunk"), [("llama", 1), ("mistral", 16), ("mistral", 44)])
def test_a_prompt_in_chunks_gives_the_same_text_and_drafts(family, chunk):
    target, drafter = make_target(family), random_drafter()
    options = {"max_new_tokens": NEW}
    whole = run_engine(make_engine(target, drafter, chunk=2048), [LONG], **options)
    engine = make_engine(target, drafter, chunk=chunk)
    shapes = shapes_of(engine)
    assert run_engine(engine, [LONG], **options) == whole
    assert whole[0] == expected([LONG], family)
    assert len(shapes) == -(-45 // chunk)


@pytest.mark.parametrize("ahead", [False, True])
def test_others_decode_between_two_chunks(ahead):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, ahead=ahead, chunk=10)
    first, second = make_requests([SHORT, LONG], max_new_tokens=NEW)
    engine.add_request(first)
    engine.step()
    engine.add_request(second)
    between = []
    while not second.output:
        between += [output.sequence for output in engine.step() if not second.output]
    assert between == [first] * 4
    finish(engine)
    assert [first.output, second.output] == expected([SHORT, LONG])


@pytest.mark.parametrize("reuse", [False, True])
def test_a_sequence_aborted_in_prefill_frees_its_slot(reuse):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, reuse=reuse, chunk=10)
    gone, other, late = make_requests([LONG, SHORT, LONG], max_new_tokens=NEW)
    engine.add_request(other)
    engine.step()
    engine.add_request(gone)
    engine.step()
    assert (gone.computed, engine.running) == (10, 2)
    engine.abort(gone)
    assert (gone.output, gone.finish_reason, engine.running) == ([], "abort", 1)
    engine.add_request(late)
    finish(engine)
    assert [other.output, late.output] == expected([SHORT, LONG])
    assert late.cached == (10 if reuse else 0)


def test_a_prefill_that_fails_loses_what_ran_and_no_more(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, reuse=True, chunk=20)
    (lost,) = make_requests([LONG], max_new_tokens=NEW)
    engine.add_request(lost)
    engine.step()

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "update_cache", broken)
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            engine.step()
    assert [output.sequence for output in engine.reset(raised.value)] == [lost]
    (again,) = make_requests([LONG], max_new_tokens=NEW)
    engine.add_request(again)
    finish(engine)
    assert (again.output, again.cached) == (expected([LONG])[0], 0)


# Several prompts in one forward -------------------------------------------------------------------


@pytest.mark.parametrize(("family", "padded"), [("llama", False), ("mistral", True)])
def test_prompts_of_similar_lengths_share_a_forward(family, padded):
    target, drafter = make_target(family), random_drafter()
    prompts = random_prompts([15, 20, 18, 70, 3])
    engine = make_engine(target, drafter, chunk=2048)
    if padded:
        padding(engine)
    shapes = shapes_of(engine)
    found, counts, blocks = run_engine(engine, prompts, max_new_tokens=NEW)
    assert shapes == ([(1, 80), (3, 20), (1, 4)] if padded else [(1, 70), (3, 20), (1, 3)])
    assert found == expected(prompts, family)
    alone = [run_engine(make_engine(target, drafter), [p], max_new_tokens=NEW) for p in prompts]
    assert blocks == set.union(*(each[2] for each in alone))
    assert counts.cycles == sum(each[1].cycles for each in alone)


@pytest.mark.parametrize(("reuse", "replayed"), [(False, True), (True, True), (True, False)])
def test_several_prompts_fill_up_a_shape_where_that_is_cheap(reuse, replayed):
    """Three fill up a shape of four; with reuse they start at different positions."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=4, reuse=reuse, chunk=2048)
    recorder = Replays() if replayed else None
    padding(engine, recorder=recorder).runner._cheap = 100
    shapes = shapes_of(engine)
    prompts = random_prompts([15, 20, 5])
    for token in range(3):
        assert run_engine(engine, prompts, max_new_tokens=NEW)[0] == expected(prompts)
        prompts = [[*prompt, token] for prompt in prompts]
    assert ((4, 8) if reuse else (4, 24)) in shapes
    assert recorder is None or recorder.outputs


@pytest.mark.parametrize(("cheap", "wanted"), [(100, [(4, 24), (1, 24)]), (0, [(5, 24)])])
def test_prompts_that_do_not_fit_a_captured_shape_are_split_where_that_is_cheap(cheap, wanted):
    """A replay costs less than launching kernels; a model that is busy computing takes them all."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=5, chunk=2048)
    padding(engine).runner._cheap = cheap
    shapes = shapes_of(engine)
    prompts = random_prompts([24, 24, 20, 20, 20])
    assert run_engine(engine, prompts, max_new_tokens=NEW)[0] == expected(prompts)
    assert shapes == wanted


@pytest.mark.parametrize(
    ("shared", "most", "wanted"),
    [(512, 8, [(2, 80)]), (100, 8, [(1, 80), (1, 80)]), (100, 1, [(2, 70)])],
)
def test_long_prompts_after_a_prefix(monkeypatch, shared, most, wanted):
    """Together up to a bound, then one by one, and launched where that were too many replays."""
    monkeypatch.setattr(model_runner, "_LONGEST_SHARED", shared)
    monkeypatch.setattr(model_runner, "_MOST_REPLAYS", most)
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, reuse=True, chunk=2048)
    padding(engine).runner._cheap = 1000
    run_engine(engine, [LONG, SHORT], max_new_tokens=1)
    shapes, prompts = shapes_of(engine), [LONG + PROMPTS[5], SHORT + PROMPTS[5]]
    assert run_engine(engine, prompts, max_new_tokens=NEW)[0] == expected(prompts)
    assert shapes == wanted


def test_prompts_with_and_without_drafts_are_computed_apart():
    engine = make_engine(make_target("llama"), random_drafter(), chunk=2048)
    shapes = shapes_of(engine)
    prompts = random_prompts([15, 15, 15])
    sequences = make_requests(prompts, max_new_tokens=NEW)
    sequences[1].speculate = False
    list(engine.stream(sequences))
    assert shapes == [(2, 15), (1, 15)]
    assert [sequence.output for sequence in sequences] == expected(prompts)


def test_a_prompt_near_the_end_of_its_slot_is_not_padded_beyond_it():
    """Prompts that share a forward start at different positions, where prefixes were reused."""
    target, drafter = make_target("llama"), random_drafter()
    room = len(PROMPTS[6]) + 20 + NEW
    engine = make_engine(target, drafter, slots=2, capacity=room, reuse=True, chunk=2048)
    run_engine(engine, PROMPTS[6:], max_new_tokens=1)
    both = [PROMPTS[6] + OTHER + SHORT, PROMPTS[4]]
    assert run_engine(engine, both, max_new_tokens=NEW)[0] == expected(both)


# Padding and graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "chunk", "replayed"), [("qwen3", 2048, True), ("mistral", 7, False)]
)
def test_padded_prompts_give_the_same_text_and_drafts(family, chunk, replayed):
    target, drafter = make_target(family), random_drafter()
    exact = make_engine(target, drafter, slots=1, chunk=2048)
    recorder = Replays() if replayed else None
    engine = make_engine(target, drafter, slots=1, chunk=chunk)
    padding(engine, recorder=recorder)
    for prompt in PROMPTS[::2]:
        options = {"max_new_tokens": NEW}
        assert run_engine(engine, [prompt], **options) == run_engine(exact, [prompt], **options)
    if replayed:
        run_engine(engine, PROMPTS[4:5], **options)
        assert len(recorder.outputs) > 0  # shapes that came again


@pytest.mark.parametrize("replayed", [False, True])
def test_padded_prompts_after_a_prefix_that_was_there(replayed):
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True, chunk=2048)
    padding(engine, recorder=Replays() if replayed else None)
    one_by_one(engine, PROMPTS[6:])
    for kept, own in ((60, PROMPTS[4]), (30, PROMPTS[2]), (3, PROMPTS[5])):
        prompt = PROMPTS[6][:kept] + own
        (sequence,) = make_requests([prompt], max_new_tokens=NEW)
        list(engine.stream([sequence]))
        assert sequence.cached >= min(kept, 30)
        assert sequence.output == expected([prompt])[0]


def test_a_sequence_in_another_slot_is_not_touched():
    """Recording runs in the spare slot, and padding stays in a prompt's own."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, chunk=2048)
    padding(engine, recorder=Replays())
    long, *short = make_requests([PROMPTS[5], *[PROMPTS[3]] * 3], max_new_tokens=NEW)
    engine.add_request(long)
    engine.step()
    for sequence in short:
        engine.add_request(sequence)
    finish(engine)
    assert long.output == expected([PROMPTS[5]])[0]
    assert [each.output for each in short] == expected([PROMPTS[3]]) * 3


def test_a_prompt_that_ends_at_the_last_position_of_a_slot():
    (prompt,) = random_prompts([84])
    engine = make_engine(
        make_target("llama"), random_drafter(), slots=1, capacity=len(prompt) + NEW, chunk=2048
    )
    padding(engine, recorder=Replays())
    assert one_by_one(engine, [prompt]) == expected([prompt])


def test_every_length_is_captured_once_and_serves_all_prompts():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, capacity=100, chunk=2048)
    recorder = Replays()
    padding(engine, recorder=recorder)
    engine.capture(1, SamplingParams())
    shapes = len(LENGTHS) + 1  # longer than a block: apart where it follows other tokens
    assert len(recorder.outputs) == shapes
    engine.capture(1, SamplingParams())
    one_by_one(engine, PROMPTS[:5])
    assert len(recorder.outputs) == shapes


@pytest.mark.parametrize("start", [0, 3])
def test_a_burst_meets_captured_shapes_alone(start):
    """Prompts in empty slots, and after a few tokens that all of them share."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=4, reuse=True, chunk=2048)
    recorder = Replays()
    padding(engine, recorder=recorder).runner._cheap = 400
    engine.capture(4, SamplingParams())
    captured = len(recorder.outputs)
    begin = SHORT[:start]
    run_engine(engine, [begin or OTHER], max_new_tokens=1)
    shapes = shapes_of(engine)
    for lengths in ([70, 75, 79], [6, 20, 60, 3], [9, 9]):
        prompts = [begin + prompt for prompt in random_prompts(lengths)]
        assert run_engine(engine, prompts, max_new_tokens=NEW)[0] == expected(prompts)
    assert len(recorder.outputs) == captured
    assert set(shapes) == {(4, 80), (2, 24)} if start == 0 else (4, 80) in shapes
    assert {count for _, count in shapes} <= set(LENGTHS), "launched kernel by kernel"


def test_where_a_graph_does_not_fit_prompts_are_computed_all_the_same():
    class Full:
        asked = 0

        def record(self, _work):
            self.asked += 1
            raise torch.OutOfMemoryError("no more")

    full = Full()
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, chunk=2048)
    padding(engine, recorder=full)
    assert one_by_one(engine, [PROMPTS[4]] * 4) == expected([PROMPTS[4]]) * 4
    assert full.asked == 1


@pytest.mark.parametrize("window", [None, Window(9), Window(9, 3)])
@pytest.mark.parametrize("start", [0, 13])
def test_a_bound_beyond_what_the_slot_holds_changes_nothing(window, start):
    """On a GPU prompts attend over a batch's caches, up to a bound."""
    make = torch.Generator().manual_seed(1)
    count, capacity = 20, 64
    query = torch.randn(1, count, 4, 8, generator=make)
    keys, values = torch.randn(2, 3, 2, capacity, 8, generator=make)
    slots, starts = torch.tensor([1]), torch.tensor([start])
    options = {"causal": True, "window": window, "scale": 0.3}
    wanted = Spans(slots, starts, count).attend(query, keys, values, **options)
    for bound in (start + count, 40, capacity):
        given = (query, keys, values, slots.unsqueeze(1), starts)
        found = batch_reference(*given, *options.values(), bound)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_what_a_prompt_sees_is_found_once_for_all_layers(monkeypatch):
    engine = make_engine(make_target("llama"), slots=1, page=16)
    engine.forget()  # the slot has pages
    found, plain = [], attention.visible
    monkeypatch.setattr(
        attention, "visible", lambda *given: found.append(given) or plain(*given)
    )  # fmt: skip
    for start, tokens in ((0, PROMPTS[5]), (70, PROMPTS[6])):
        engine.runner.prefill([PromptChunk(0, start, tokens)], drafts=False)
    assert len(found) == 1, "the first chunk sees by causality alone"


def test_prompts_without_drafts_leave_the_drafters_cache_alone():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, chunk=2048)
    padding(engine, recorder=Replays())
    blocks, before = watch(engine), [part.clone() for part in engine.drafter.cache.layers[:2]]
    (sequence,) = make_requests([PROMPTS[4]], max_new_tokens=NEW)
    sequence.speculate = False
    list(engine.stream([sequence]))
    assert sequence.output == expected([PROMPTS[4]])[0]
    assert not blocks
    assert all(map(torch.equal, before, engine.drafter.cache.layers[:2]))
