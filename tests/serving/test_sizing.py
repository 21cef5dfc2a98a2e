"""Slots are what the memory holds; what the settings name is kept or refused."""

import pytest

from domino_spec.engine.sizes import MOST_DRAFTING, Size
from domino_spec.errors import InputError
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.service import cache_size, sequence_limits

GB = 10**9


def size(free, *, context=8192, token_bytes=100_000, on_gpu=True, **settings):
    return cache_size(
        ServerConfig(model="m", **settings),
        on_gpu=on_gpu, context=context, token_bytes=token_bytes, free=free,
    )  # fmt: skip


def test_plenty_of_memory_gives_the_most_slots_of_the_whole_context():
    assert size(1000 * GB) == Size(MOST_DRAFTING, 8192)
    assert size(None) == Size(MOST_DRAFTING, 8192)


def test_less_memory_gives_fewer_slots_then_shorter_ones():
    tight = size(10 * GB)
    assert tight.capacity == 8192
    assert 4 <= tight.slots < MOST_DRAFTING
    tighter = size(2 * GB)
    assert tighter.capacity < 8192
    assert tighter.slots >= 4


@pytest.mark.parametrize("free", [1, 2, 5, 20, 100])
def test_what_is_taken_is_there(free):
    found = size(free * GB)
    assert (found.slots + 1) * found.capacity * 100_000 <= free * GB


def test_what_was_asked_for_is_kept_or_refused():
    assert size(100 * GB, slots=3) == Size(3, 8192)
    with pytest.raises(InputError, match="3 slots of 8192 tokens take 3.3 GB of memory; 0.6 GB"):
        cache_size(
            ServerConfig(model="m", slots=3, context=8192),
            on_gpu=True, context=8192, token_bytes=100_000, free=GB,
        )  # fmt: skip
    with pytest.raises(InputError, match="context is 9000; the target was made for 8192"):
        cache_size(
            ServerConfig(model="m", context=9000),
            on_gpu=True, context=8192, token_bytes=100_000, free=None,
        )  # fmt: skip


def test_a_cpu_gets_few_and_an_endless_context_is_cut():
    assert size(None, on_gpu=False) == Size(8, 4096)
    asked = ServerConfig(model="m", context=8192)
    large = cache_size(asked, on_gpu=False, context=8192, token_bytes=1, free=None)
    assert large.capacity == 8192, "what is asked for is had"
    assert size(None, context=1_000_000).capacity == 32768
    assert size(None, context=None).capacity == 32768


def test_limits_leave_room_for_one_token():
    limits = sequence_limits(ServerConfig(model="m", max_prompt_tokens=5000, max_new_tokens=7), 100)
    assert (limits.context, limits.max_prompt_tokens, limits.max_new_tokens) == (100, 99, 7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": ""}, "name is empty"),
        ({"port": 70000}, "port is 70000"),
        ({"api_keys": ("good", " ")}, "API key is empty"),
        ({"slots": 0}, "slots is 0"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"max_body_bytes": 10}, "max_body_bytes is 10"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan"),
    ],
)
def test_wrong_settings_are_refused_in_words(settings, words):
    with pytest.raises(InputError, match=words):
        ServerConfig(**{"model": "m", **settings})


def test_who_can_reach_it():
    assert not ServerConfig(model="m").public
    assert ServerConfig(model="m", host="0.0.0.0").public
