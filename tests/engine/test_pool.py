"""Engines are made once, grow, come back from every run, and never cost a second copy."""

import gc
import weakref
from threading import Event, Thread

import pytest
import torch

from domino_spec.api.rows import make_rows
from domino_spec.decoding import RunStats, SamplingParams
from domino_spec.engine import pool as pool_module
from domino_spec.engine import sizes
from domino_spec.engine.draft import LeanDrafter
from domino_spec.engine.pool import EnginePool
from domino_spec.engine.sizes import (
    Size,
    fitting,
    free_bytes,
    packed_bytes,
    size_for,
    token_bytes,
)
from domino_spec.engine.target import LeanTarget
from domino_spec.errors import InputError
from tests.engine.runs import make_engine, own, run_reference
from tests.support.families import make_target, random_drafter, random_prompts

PROMPTS = random_prompts([3, 9, 5, 7, 2])
NEW = 12


def make_pool(target=None, drafter=None, **options):
    target = own(make_target("llama")) if target is None else target
    drafter = random_drafter() if drafter is None else drafter
    options = {"depth": 7, "candidates": None, "pack": None, **options}
    return EnginePool(target, drafter, **options)


def rows_for(pool, prompts, new=NEW):
    params = [SamplingParams(max_new_tokens=new)] * len(prompts)
    return make_rows(prompts, params, pool._target, None, chat_options={}, ends=()), params


def run(pool, prompts=PROMPTS, *, new=NEW, speculate=True):
    """Tokens, and the engine that made them."""
    rows, params = rows_for(pool, prompts, new)
    with pool.lend(rows, speculate=speculate) as engine:
        for _ in engine.run([(r, p, 0) for r, p in zip(rows, params, strict=True)]):
            pass
    return [row.generated for row in rows], engine


def expected(prompts=PROMPTS, new=NEW):
    options = {"depth": 0, "candidates": None, "max_new_tokens": new}
    return run_reference(make_target("llama"), None, prompts, **options)[0]


def matrices(engine):
    """Every matrix of both models, packed or not, by identity."""
    layers = [*engine.target.layers, *engine.drafter.layers]
    return [id(value) for weights in layers for value in vars(weights).values()]


def test_one_engine_serves_run_after_run():
    pool = make_pool()
    first, engine = run(pool, PROMPTS[:1])
    cache = engine.target.cache._states.data_ptr()
    second, again = run(pool, PROMPTS[:1])
    assert again is engine
    assert engine.target.cache._states.data_ptr() == cache
    assert first == second == expected()[:1]
    assert not engine.busy


def test_it_grows_in_slots_and_in_length_with_the_same_weights():
    pool = make_pool()
    _, engine = run(pool, PROMPTS[:1])
    assert (engine.slots.count, engine.capacity) == (1, 256)  # the target's context
    held, old = matrices(engine), weakref.ref(engine.target.cache._states)
    found, grown = run(pool, PROMPTS)
    assert grown is engine
    assert found == expected()
    assert engine.slots.count == 8
    assert matrices(engine) == held
    gc.collect()
    assert old() is None
    assert run(pool, PROMPTS[:2])[0] == expected()[:2]  # a small run takes the large engine
    assert engine.slots.count == 8


def test_more_rows_than_slots_take_turns(monkeypatch):
    monkeypatch.setattr(sizes, "MOST_SLOTS", 2)
    found, engine = run(make_pool())
    assert engine.slots.count == 2
    assert found == expected()


def test_plain_runs_do_no_drafters_work(monkeypatch):
    pool = make_pool()
    _, engine = run(pool)
    held = matrices(engine)
    for name in ("observe", "propose", "hidden"):
        monkeypatch.setattr(LeanDrafter, name, None)
    found, plain = run(pool, speculate=False)
    assert found == expected()
    assert plain is engine
    assert matrices(plain) == held
    monkeypatch.undo()
    assert run(pool)[0] == expected()  # and back again


def test_a_run_that_nobody_finishes_leaves_the_engine_as_good_as_new():
    pool = make_pool()
    for ahead in (False, True):
        _, engine = run(pool)
        engine.ahead = ahead
        rows, params = rows_for(pool, PROMPTS)
        with pool.lend(rows, speculate=True) as lent:
            assert lent is engine
            running = lent.run([(r, p, 0) for r, p in zip(rows, params, strict=True)])
            for _ in range(8):
                next(running)
            running.close()
        assert not engine.busy
        assert engine.free == engine.slots.count
        found, again = run(pool)
        assert again is engine
        assert found == expected()


def test_whoever_comes_while_it_is_taken_gets_a_twin_that_is_given_up():
    pool = make_pool()
    held, params = rows_for(pool, PROMPTS[:2])
    with pool.lend(held, speculate=True) as engine:
        running = engine.run([(r, p, 0) for r, p in zip(held, params, strict=True)])
        next(running)
        found, twin = run(pool, PROMPTS[2:])
        assert twin is not engine
        assert matrices(twin) == matrices(engine)
        list(running)
    assert [row.generated for row in held] == expected()[:2]
    assert found == expected()[2:]
    gone = weakref.ref(twin if pool._kept is engine else engine)
    del twin, engine, running
    gc.collect()
    assert gone() is None  # one engine's slots are enough
    assert run(pool)[0] == expected()


def test_an_error_of_the_callers_gives_the_engine_back():
    pool = make_pool()
    _, engine = run(pool)
    rows, _ = rows_for(pool, PROMPTS)
    with pytest.raises(RuntimeError, match="mine"), pool.lend(rows, speculate=True):
        raise RuntimeError("mine")
    assert run(pool) == (expected(), engine)


def test_memory_that_runs_out_while_growing_costs_only_that_run(monkeypatch):
    pool = make_pool()
    _, engine = run(pool, PROMPTS[:1])
    held = matrices(engine)

    def resize(self, **sizes):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LeanDrafter, "resize", resize)
    with pytest.raises(torch.OutOfMemoryError):
        run(pool)
    monkeypatch.undo()
    caches = (engine.target.cache, engine.drafter.cache)
    assert [cache.nbytes for cache in caches] == [0, 0]  # somebody else needs it now
    found, other = run(pool)
    assert found == expected()
    assert other is engine
    assert matrices(other) == held


def test_growing_gives_back_all_slots_before_it_takes_any(monkeypatch):
    pool = make_pool()
    _, engine = run(pool, PROMPTS[:1])
    plain, held = LeanTarget.resize, []

    def resize(self, **sizes):
        held.append(engine.target.cache.nbytes + engine.drafter.cache.nbytes)
        plain(self, **sizes)

    monkeypatch.setattr(LeanTarget, "resize", resize)
    run(pool)
    assert held == [0]


def test_costs_that_nobody_waited_for_cost_no_second_engine(monkeypatch):
    def interrupted(engine, *, batches):
        raise KeyboardInterrupt

    pool = make_pool(depth=None)
    monkeypatch.setattr(pool_module, "adapt_depth", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(pool)
    first = pool._source
    assert run(pool, speculate=False) == (expected(), first)


def test_threads_that_come_together_share_the_weights(monkeypatch):
    pool, made, second = make_pool(), [], []
    plain, came = pool_module.Engine, Event()

    def make(*arguments, **options):
        made.append(None)
        if len(made) > 1:
            came.set()
        elif not second:
            second.append(Thread(target=lambda: made.append(run(pool, PROMPTS[1:2]))))
            second[0].start()
            came.wait(0.2)  # as long as it takes if it may come in
        return plain(*arguments, **options)

    monkeypatch.setattr(pool_module, "Engine", make)
    found, engine = run(pool, PROMPTS[:1])
    second[0].join()
    assert made[:1] == [None]
    ((other, its),) = made[1:]
    assert found + other == expected()[:2]
    assert matrices(its) == matrices(engine)


def test_a_callers_inference_mode_stays_the_callers():
    """Its tensors could not be written to by anybody outside."""
    pool = make_pool(depth=3)
    with torch.inference_mode():
        assert run(pool)[0] == expected()
    assert run(pool)[0] == expected()
    weight = pool._target.model.model.layers[0].self_attn.q_proj.weight
    assert not weight.is_inference()


def test_an_engine_with_rows_is_neither_resized_nor_told_to_stop_drafting():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    params = SamplingParams(max_new_tokens=NEW)
    (row,) = make_rows(
        [[5, 6]], [params], own(make_target("llama")), None, chat_options={}, ends=()
    )
    engine.admit(row, params)
    with pytest.raises(InputError, match="1 rows are running; their tokens would be lost"):
        engine.resize(slots=2, capacity=64)
    with pytest.raises(InputError, match="1 rows are running"):
        engine.speculates = False


def test_a_run_is_counted_and_timed():
    pool = make_pool()
    rows, params = rows_for(pool, PROMPTS)
    stats = RunStats()
    with pool.lend(rows, speculate=True) as engine:
        commits = list(engine.run([(r, p, 0) for r, p in zip(rows, params, strict=True)], stats))
    assert stats.engine == "fast"
    assert stats.rows.cycles == sum(row.stats.cycles for row in rows)
    assert stats.rows.committed == sum(len(commit.tokens) for commit in commits) - len(rows)
    assert stats.rows.offered[0] == sum(row.stats.offered[0] for row in rows)
    assert min(stats.prefill_seconds, stats.whole_seconds) > 0
    assert stats.seconds == stats.prefill_seconds + stats.cycle_seconds
    values = stats.to_dict()
    assert values["draft_seconds"] is values["verify_seconds"] is values["other_seconds"] is None
    assert values["cycle_seconds"] == stats.whole_seconds


# Depth --------------------------------------------------------------------------------------------


def test_costs_are_measured_for_the_rows_there_are(monkeypatch):
    asked = []

    def adapt(engine, *, batches):
        asked.append(list(batches))
        engine.policy = type("Known", (), {"knows": lambda _, rows: rows <= batches[-1]})()

    monkeypatch.setattr(pool_module, "adapt_depth", adapt)
    pool = make_pool(depth=None)
    for prompts in (PROMPTS[:1], PROMPTS[:1], PROMPTS, PROMPTS[:2]):
        rows, _ = rows_for(pool, prompts)
        with pool.lend(rows, speculate=True):
            pass
    assert asked == [[1], [1, 4, 8]]
    plain = make_pool(depth=None)
    with plain.lend(rows_for(plain, PROMPTS)[0], speculate=False):
        pass
    with make_pool(depth=3).lend(rows, speculate=True) as fixed:
        assert fixed.policy is None
    assert len(asked) == 2


# Sizes --------------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_and_end_with_the_context():
    target = own(make_target("llama"))
    params = SamplingParams(max_new_tokens=40)
    lengths = [9, 100, 30]
    rows = make_rows(random_prompts(lengths), [params] * 3, target, None, chat_options={}, ends=())
    assert size_for(rows, target) == Size(4, 256)
    target.config.max_position_embeddings = 1 << 20
    assert size_for(rows, target) == Size(4, 1024)
    rows[1].max_new_tokens = 3000
    assert size_for(rows, target) == Size(4, 4096)
    assert size_for(rows * 100, target).slots == sizes.MOST_SLOTS


@pytest.mark.parametrize(("free", "found"), [
    (10**9, Size(8, 4096)),  # what there is stays, and grows
    (41000, Size(4, 4096)),
    (25000, Size(2, 4096)),
    (17000, Size(1, 4096)),
    (7000, Size(1, 3000)),  # without any rounding
    (6000, None),
])  # fmt: skip
def test_slots_follow_the_memory(free, found):
    assert fitting(Size(4, 4096), Size(8, 1024), 3000, row=1, free=free) == found


def test_a_token_costs_its_keys_and_values_in_both_models():
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=3, capacity=50)
    places = 4 * (50 + engine.margin)
    assert engine.target.cache.nbytes == token_bytes(target, None) * places
    both = engine.target.cache.nbytes + engine.drafter.cache.nbytes
    assert both == token_bytes(target, drafter) * places


def test_weights_are_packed_where_the_copy_leaves_as_much_free(monkeypatch):
    target, drafter = make_target("llama"), random_drafter()
    copy = packed_bytes(target, drafter)
    assert copy > sum(p.nbytes for p in target.model.model.layers.parameters())
    for free, pack, packs in (
        (2 * copy + (1 << 30), None, True),
        (2 * copy - 1, None, False),
        (2 * copy - 1 + (1 << 30), True, True),
        (None, None, True),
    ):
        monkeypatch.setattr(pool_module, "free_bytes", lambda _, free=free: free)
        monkeypatch.setattr(pool_module, "fitting", lambda wanted, *_, **__: wanted)
        found, engine = run(make_pool(pack=pack))
        assert engine.packs is packs
        assert found == expected()


def test_slots_take_no_memory_that_the_copy_needs(monkeypatch):
    seen = []

    def fits(wanted, present, needed, *, row, free):
        seen.append(free)
        return wanted

    monkeypatch.setattr(pool_module, "fitting", fits)
    monkeypatch.setattr(pool_module, "free_bytes", lambda _: 1 << 30)
    pool = make_pool()
    run(pool, PROMPTS[:1])
    (before,) = seen
    assert before == (1 << 30) - packed_bytes(pool._target, pool._drafter)
    run(pool)
    assert seen[1] > 1 << 30  # packed already, and its slots are given back


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


def test_free_memory_is_known_here_or_not_at_all():
    found = free_bytes(torch.device("cpu"))
    assert found is None or found > 1 << 20
