"""The service on a real engine, and the sizes of its caches."""

import asyncio
import gc
import weakref

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.api.sequences import stop_rules
from domino_spec.decoding import SamplingParams, Sequence, Status
from domino_spec.engine import engine
from domino_spec.engine.sizes import MOST_DRAFTING, Size
from domino_spec.errors import InputError
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import ContextLengthError, ShuttingDownError
from domino_spec.serving.service import Service, cache_size, sequence_limits
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.tokens import small_tokenizer

PROMPTS = random_prompts([3, 9, 5, 14, 2, 30])


def make_service(*, engine="auto", drafter=True, **settings):
    decoder = DominoDecoder(
        make_target("llama"), random_drafter() if drafter else None, small_tokenizer(),
        depth=3 if drafter else None, engine=engine,
    )  # fmt: skip
    settings = {"slots": 3, "context": 128, **settings}
    return Service(decoder, ServerConfig(model="tiny", **settings))


def test_stop_strings_are_found_in_the_text_that_is_told():
    """Special tokens that are part of the text are part of what is searched."""
    tokenizer = small_tokenizer()
    think, x = (tokenizer.convert_tokens_to_ids(name) for name in ("<|think|>", "x"))
    params = SamplingParams(stop=("k|>x",))
    for kept, reason in (({think: "<|think|>"}, "stop"), (None, None)):
        sequence = Sequence([5], params, stop_rules=stop_rules(params, tokenizer, (), kept=kept))
        sequence.take([think, x])
        assert sequence.finish_reason == reason


def serving(check, **settings):
    """Run an async check against a service, which must be empty when it is over."""

    async def run():
        service = make_service(**settings)
        service.engine.start()
        try:
            await check(service)
        finally:
            await service.stop(10)
        assert (service.engine.running, service.engine.waiting) == (0, 0)

    asyncio.run(run())


def submit(service, *wanted, client="me"):
    """Queue (prompt, tokens, options), whose options are those of `ask`."""
    sequences = [ask(service, index, *one) for index, one in enumerate(wanted)]
    return service.submit(sequences, client=client)


def ask(service, index, prompt, tokens=12, options=()):
    """A sequence; its options are sampling parameters, `speculate` and `reuse`."""
    options = {"ignore_eos": True, **dict(options)}
    own = {name: options.pop(name) for name in ("speculate", "reuse") if name in options}
    params = SamplingParams(max_new_tokens=tokens, **options)
    return service.sequence(prompt, params, index=index, **own)


async def each_of(stream):
    """Outputs one by one."""
    async for outputs in stream:
        for output in outputs:
            yield output


async def answer(service, *wanted, client="me"):
    """Tokens of each sequence."""
    found = [[] for _ in wanted]
    async with submit(service, *wanted, client=client) as stream:
        async for output in each_of(stream):
            assert output.error is None
            found[output.sequence.index].extend(output.tokens)
    return found


def alone(prompt, tokens=12, **params):
    decoder = DominoDecoder(make_target("llama"), None, small_tokenizer(), engine="reference")
    params = {"ignore_eos": True, **params}
    return decoder.generate(list(prompt), max_new_tokens=tokens, **params).tokens


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("drafter", [True, False])
def test_many_at_once_write_what_each_writes_alone(engine, drafter):
    async def check(service):
        wanted = [(prompt, 3 + 2 * number) for number, prompt in enumerate(PROMPTS)]
        found = await answer(service, *wanted)
        assert found == [alone(*each) for each in wanted]

    serving(check, engine=engine, drafter=drafter)


def test_each_sequence_has_its_own_parameters():
    async def check(service):
        params = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.2, "top_k": 4, "seed": 6}]
        expected = [alone(PROMPTS[1], **each, accept="coupled") for each in params]
        assert await answer(service, *((PROMPTS[1], 12, each) for each in params)) == expected
        assert len({tuple(tokens) for tokens in expected}) == 3

    serving(check)


def test_a_sequence_joins_and_ends_before_an_earlier_one():
    async def check(service):
        order = []

        async def listen(name, stream):
            async for output in each_of(stream):
                order.append((name, output.finish_reason))  # noqa: PERF401 (two write here)

        early = submit(service, (PROMPTS[0], 60), client="a")
        task = asyncio.create_task(listen("early", early))
        while not order:
            await asyncio.sleep(0)
        late = submit(service, (PROMPTS[1], 5), client="b")
        await asyncio.gather(task, listen("late", late))
        assert order.index(("late", "length")) < order.index(("early", "length"))

    serving(check)


def test_a_prefix_is_computed_once():
    async def check(service):
        first = PROMPTS[5]
        (text,) = await answer(service, (first,))
        follow_up = [*first, *text, 7, 8, 9]
        there = len(first) + len(text) - 1  # the last token has no keys and values yet
        for reuse, expected in ((True, there), (False, 0)):
            stream = submit(service, (follow_up, 12, {"reuse": reuse}))
            (sequence,) = stream.sequences
            tokens = [token async for output in each_of(stream) for token in output.tokens]
            assert tokens == alone(follow_up)
            assert sequence.cached == expected

    serving(check)


def test_choices_of_one_prompt_compute_it_once():
    async def check(service):
        each = ({"temperature": 1.0, "seed": number} for number in range(3))
        (prompt,) = random_prompts([90])  # a short one is computed for each, in one forward
        stream = submit(service, *((prompt, 4, options) for options in each))
        async for _ in stream:
            pass
        assert [sequence.cached for sequence in stream.sequences] == [0, 89, 89]

    serving(check)


def test_a_client_may_leave_in_the_midst_of_its_prefill(monkeypatch):
    monkeypatch.setattr(engine, "CPU_CHUNK", 4)  # a long prompt takes several steps

    async def check(service):
        early = submit(service, (PROMPTS[0], 60), client="a")
        await anext(early)
        leaving = submit(service, (PROMPTS[5],), client="b")
        held, real = asyncio.Event(), service.engine.engine
        loop, step = asyncio.get_running_loop(), real.step

        def watched():
            outputs = step()
            if leaving.sequences[0].status is Status.PREFILL:
                loop.call_soon_threadsafe(held.set)
            return outputs

        monkeypatch.setattr(real, "step", watched)
        await held.wait()
        leaving.cancel()
        async for _ in early:
            pass
        assert (await answer(service, (PROMPTS[5],)))[0] == alone(PROMPTS[5])

    serving(check)


def test_what_the_engine_refuses_fails_alone():
    """Hooks cannot come over HTTP, but a caller of the service may try."""

    async def check(service):
        hooks = (lambda prompt, output, logits: logits,)
        bad = {"temperature": 0.8, "accept": "rejection", "hooks": hooks}
        stream = submit(service, (PROMPTS[1],), (PROMPTS[0], 12, bad))
        errors = {output.sequence.index: output.error async for output in each_of(stream)}
        assert errors[0] is None
        assert "asks for accept='rejection'" in str(errors[1])

    serving(check)


def test_sequences_with_and_without_drafts_run_together():
    async def check(service):
        wanted = (PROMPTS[1], 20)
        stream = submit(service, (*wanted, {"speculate": False}), wanted)
        sizes = ([], [])
        async for output in each_of(stream):
            sizes[output.sequence.index].append(len(output.tokens))
        plain, drafted = stream.sequences
        assert plain.output == drafted.output == alone(*wanted)
        assert set(sizes[0]) == {1}
        assert not plain.stats.drafted
        assert drafted.stats.drafted
        assert service.info().slots == 3

    serving(check)


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        ([1] * 61, 1, "the prompt has 61 tokens; this server takes 60"),
        ([1] * 10, 101, "101 new tokens are requested; this server gives 100"),
        ([1] * 50, 90, "together more than the context of 128.*at most 78"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(prompt, tokens, words):
    async def check(service):
        with pytest.raises(ContextLengthError, match=words):
            ask(service, 0, prompt, tokens)

    serving(check, max_prompt_tokens=60, max_new_tokens=100)


def test_more_messages_than_tokens_are_refused_before_the_template_sees_them():
    async def check(service):
        with pytest.raises(ContextLengthError, match="61 messages.*takes 60 tokens"):
            await service.encode_chat([{"role": "user", "content": ""}] * 61, {})

    serving(check, max_prompt_tokens=60)


@pytest.mark.parametrize("prompt", [[], [97], [-1]])
def test_wrong_tokens_are_refused_at_once(prompt):
    async def check(service):
        with pytest.raises(InputError):
            ask(service, 0, prompt)

    serving(check)


def test_a_stopped_service_takes_nothing_and_leaves_nothing():
    async def check(service):
        stream = submit(service, (PROMPTS[0], 120))
        kept.append(weakref.ref(stream.sequences[0]))
        await service.stop(0)
        outputs = [output async for output in each_of(stream)]
        assert isinstance(outputs[-1].error, ShuttingDownError)
        with pytest.raises(ShuttingDownError):
            submit(service, (PROMPTS[0],))
        assert service.engine.state == "stopping"

    kept = []
    serving(check)
    gc.collect()
    assert [each() for each in kept] == [None]


def test_what_anybody_may_know():
    async def check(service):
        info = service.info()
        assert (info.model, info.speculates, info.slots, info.context) == ("tiny", True, 3, 128)
        assert await service.encode_text("the fox") == small_tokenizer()("the fox")["input_ids"]
        chat = await service.encode_chat([{"role": "user", "content": "hi"}], {})
        assert chat[-1] == small_tokenizer().convert_tokens_to_ids("<|assistant|>")

    serving(check)


# Sizes --------------------------------------------------------------------------------------------


GB = 10**9


def size(free, *, context=8192, token_bytes=100_000, on_gpu=True, paged=False, **settings):
    return cache_size(
        ServerConfig(model="m", **settings),
        on_gpu=on_gpu, context=context, token_bytes=token_bytes, free=free, paged=paged,
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


def test_pages_are_for_all_slots_together():
    assert size(1000 * GB, paged=True) == Size(MOST_DRAFTING, 8192)
    tight = size(10 * GB, paged=True)
    assert tight == Size(MOST_DRAFTING - 22, 8192, 60_000)
    few = size(2 * GB, paged=True)
    assert (few.capacity, few.tokens) == (8192, 12_000)
    assert 40 < few.slots < 50
    assert size(GB, paged=True).capacity == 4096
    assert size(GB, paged=True, slots=3) == Size(3, 4096, 6_000)
    with pytest.raises(InputError, match="3 slots, one of which holds 8192 .*0.8 GB.*; 0.6 GB"):
        cache_size(
            ServerConfig(model="m", slots=3, context=8192),
            on_gpu=True, context=8192, token_bytes=100_000, free=GB, paged=True,
        )  # fmt: skip


@pytest.mark.parametrize("free", [1, 2, 5, 20, 100])
def test_what_is_taken_is_there(free):
    found = size(free * GB)
    assert (found.slots + 1) * found.capacity * 100_000 <= free * GB


def test_what_a_slot_takes_whatever_it_holds_counts_too():
    plain, hybrid = (
        cache_size(
            ServerConfig(model="m", context=8192),
            on_gpu=True, context=8192, token_bytes=100_000, slot_bytes=each, free=20 * GB,
        )
        for each in (0, 8192 * 100_000)
    )  # fmt: skip
    assert plain.slots + 1 == 2 * (hybrid.slots + 1)


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
        ({"model": ""}, "model is ''"),
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
