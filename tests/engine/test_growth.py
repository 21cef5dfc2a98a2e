"""Caches grow with the requests, as far as the memory goes; weights stay where they are."""

import gc
import weakref

import pytest
import torch

from domino_spec.drafters import BlockDrafter
from domino_spec.engine import sizes
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sizes import (
    Size,
    fitting,
    free_bytes,
    packed_bytes,
    packs_by_default,
    token_bytes,
    wanted_size,
)
from domino_spec.errors import InputError
from tests.engine.runs import finish, make_engine, make_requests, own, run_engine, run_reference
from tests.support.families import make_target, random_drafter, random_prompts

PROMPTS = random_prompts([3, 9, 5, 7, 2])
NEW = 12


def growing(**options):
    return make_engine(
        make_target("llama"), random_drafter(), **{"slots": None, "capacity": None, **options}
    )


def run(engine, prompts=PROMPTS, **options):
    return run_engine(engine, prompts, **{"max_new_tokens": NEW, **options})[0]


def expected(prompts=PROMPTS, new=NEW):
    return run_reference(make_target("llama"), None, prompts, max_new_tokens=new)[0]


def matrices(engine):
    """Every matrix of both models, packed or not, by identity."""
    layers = [*engine.target.layers, *engine.drafter._layers]
    return [id(value) for weights in layers for value in vars(weights).values()]


def test_caches_grow_in_slots_and_in_length_with_the_same_weights():
    engine = growing()
    assert engine.cache_bytes == 0 or engine.size.slots == 0
    run(engine, PROMPTS[:1])
    assert engine.size == Size(1, 256)  # the target's context
    held, old = matrices(engine), weakref.ref(engine.target.cache._states)
    assert run(engine) == expected()
    assert engine.slots.count == 8
    assert matrices(engine) == held
    gc.collect()
    assert old() is None
    cache = engine.target.cache._states.data_ptr()
    assert run(engine, PROMPTS[:2]) == expected()[:2]
    assert engine.target.cache._states.data_ptr() == cache  # large enough: nothing is made anew


def test_caches_grow_between_sequences_and_not_under_them():
    engine = growing()
    sequences = make_requests(PROMPTS, max_new_tokens=NEW)
    engine.add_request(sequences[0])
    engine.step()
    for sequence in sequences[1:]:
        engine.add_request(sequence)
    engine.step()
    assert (engine.slots.count, engine.waiting) == (1, 4)
    finish(engine)
    assert engine.slots.count == 4
    assert [sequence.output for sequence in sequences] == expected()


def test_a_longer_sequence_waits_until_caches_can_grow(monkeypatch):
    monkeypatch.setattr(sizes, "_FIRST_CAPACITY", 32)
    engine = growing()
    short, long, last = make_requests([PROMPTS[0], [7] * 60, PROMPTS[1]], max_new_tokens=NEW)
    engine.add_request(short)
    engine.step()
    assert engine.capacity == 32
    engine.add_request(long)
    engine.add_request(last)
    finish(engine)
    assert engine.capacity == 128
    found = [sequence.output for sequence in (short, long, last)]
    assert found == expected([PROMPTS[0], [7] * 60, PROMPTS[1]])


def test_more_sequences_than_slots_take_turns(monkeypatch):
    monkeypatch.setattr(sizes, "MOST_DRAFTING", 2)
    engine = growing()
    assert run(engine) == expected()
    assert engine.slots.count == 2


def test_the_number_of_sequences_follows_the_memory(monkeypatch):
    """Here there is room for three slots of the context, one of which fills up batches."""
    token = token_bytes(make_target("llama"), BlockDrafter(random_drafter()))
    monkeypatch.setattr(sizes, "free_bytes", lambda _: 2 * 3 * 256 * token)
    engine = growing()
    assert run(engine) == expected()
    assert engine.size == Size(2, 256)


def test_a_sequence_that_the_memory_does_not_hold_ends_and_others_go_on(monkeypatch):
    token = token_bytes(make_target("llama"), BlockDrafter(random_drafter()))
    monkeypatch.setattr(sizes, "free_bytes", lambda _: 150 * token)
    engine = growing()
    large, small = make_requests([[5] * 200, PROMPTS[0]], max_new_tokens=NEW)
    assert "takes 0.0 GB of memory" in engine.no_room_reason([large])
    assert engine.no_room_reason([small]) is None
    for sequence in (large, small):
        engine.add_request(sequence)
    outputs = finish(engine)
    assert isinstance(large.error, torch.OutOfMemoryError)
    assert [output.error for output in outputs if output.sequence is large] == [large.error]
    assert small.output == expected(PROMPTS[:1])[0]


def test_memory_that_runs_out_while_growing_costs_that_run_alone(monkeypatch):
    engine = growing()
    run(engine, PROMPTS[:1])
    held = matrices(engine)

    def resize(self, **sizes):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BlockDrafter, "resize", resize)
        with pytest.raises(torch.OutOfMemoryError):
            run(engine)
    assert engine.cache_bytes == 0  # others may need it now
    assert run(engine) == expected()
    assert matrices(engine) == held


def test_a_fixed_engine_whose_caches_were_lost_makes_them_again(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, capacity=64)

    def resize(self, **sizes):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BlockDrafter, "resize", resize)
        with pytest.raises(torch.OutOfMemoryError):
            engine.reset(RuntimeError("a step failed"))
    assert run(engine) == expected()
    assert engine.size == Size(2, 64)


def test_growing_gives_back_all_slots_before_it_takes_any(monkeypatch):
    engine = growing()
    run(engine, PROMPTS[:1])
    plain, held = InferenceModel.resize, []

    def resize(self, **sizes):
        held.append(engine.cache_bytes)
        plain(self, **sizes)

    monkeypatch.setattr(InferenceModel, "resize", resize)
    run(engine)
    assert held == [0]


def test_a_running_engine_is_not_resized():
    engine = growing()
    (sequence,) = make_requests(PROMPTS[:1], max_new_tokens=NEW)
    engine.add_request(sequence)
    engine.step()
    with pytest.raises(InputError, match="1 sequences are running"):
        engine.resize(slots=2, capacity=64)


def test_a_callers_inference_mode_stays_the_callers():
    """Tensors made in it could not be written to outside of it."""
    engine = growing()
    with torch.inference_mode():
        assert run(engine) == expected()
    assert run(engine) == expected()


# Sizes --------------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_and_end_with_the_context():
    target = own(make_target("llama"))
    sequences = make_requests(random_prompts([9, 100, 30]), max_new_tokens=40)
    assert wanted_size(sequences, target, drafts=True) == Size(4, 256)
    target.config.max_position_embeddings = 1 << 20
    assert wanted_size(sequences, target, drafts=True) == Size(4, 1024)
    (long,) = make_requests([[5] * 100], max_new_tokens=3000)
    assert wanted_size([*sequences[1:], long], target, drafts=True) == Size(4, 4096)
    many = sequences * 200
    assert wanted_size(many, target, drafts=True) == Size(sizes.MOST_DRAFTING, 192)
    assert wanted_size(many, target, drafts=False).slots == sizes.MOST_PLAIN["cpu"]


@pytest.mark.parametrize(("free", "found"), [
    (10**9, Size(8, 4096)),  # what there is stays, and grows
    (41000, Size(4, 4096)),
    (25000, Size(2, 4096)),
    (17000, Size(1, 4096)),
    (7000, Size(1, 3000)),  # without any rounding
    (6000, None),
])  # fmt: skip
def test_slots_follow_the_memory(free, found):
    assert fitting(Size(4, 4096), Size(8, 1024), 3000, per_token=1, free=free) == found


def test_a_token_costs_its_keys_and_values_in_both_models():
    target, drafter = make_target("llama"), BlockDrafter(random_drafter())
    engine = make_engine(target, drafter, slots=3, capacity=50)
    places = 4 * (50 + engine.margin)
    assert engine.target.cache.nbytes == token_bytes(target, None) * places
    assert engine.cache_bytes == token_bytes(target, drafter) * places


@pytest.mark.parametrize(("share", "packs"), [(2.0, True), (1.9, False), (None, True)])
def test_weights_are_packed_where_the_copy_leaves_as_much_free(share, packs, monkeypatch):
    target, drafter = make_target("llama"), BlockDrafter(random_drafter())
    copy = packed_bytes(target, drafter)
    assert copy > sum(p.nbytes for p in target.model.model.layers.parameters())
    free = None if share is None else int(share * copy)
    monkeypatch.setattr(sizes, "free_bytes", lambda _: free)
    assert packs_by_default(target, drafter) is packs


def test_what_graphs_write_into_is_not_free(monkeypatch):
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 30},
        {"device": 0, "segment_pool_id": (0, 2), "total_size": 50, "allocated_size": 20},
        {"device": 1, "segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 150)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 50)
    assert free_bytes(torch.device("cuda", 0)) == 1000 + 100 - 30
