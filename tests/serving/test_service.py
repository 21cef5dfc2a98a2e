"""The service on a real engine: rows join, leave, share prefixes, and write as if alone."""

import asyncio
import gc

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError
from domino_spec.serving import lanes
from domino_spec.serving.asks import Ask, Block, BusyError, Ended, StoppingError, TooLongError
from domino_spec.serving.jobs import Job
from domino_spec.serving.service import Service
from domino_spec.serving.settings import ServerSettings
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.tokens import small_tokenizer

PROMPTS = random_prompts([3, 9, 5, 14, 2, 30])


def make_service(*, engine="auto", drafter=True, **settings):
    decoder = DominoDecoder(
        make_target("llama"), random_drafter() if drafter else None, small_tokenizer(),
        depth=3 if drafter else None, engine=engine,
    )  # fmt: skip
    settings = {"slots": 3, "context": 128, **settings}
    return Service(decoder, ServerSettings(model="tiny", **settings))


def serving(check, **settings):
    """Run an async check against a service, which must be empty when it is over."""

    async def run():
        service = make_service(**settings)
        await service.start()
        try:
            await check(service)
        finally:
            await service.stop(10)
        assert (service.worker.running, service.worker.waiting) == (0, 0)

    asyncio.run(run())


def ask(prompt, tokens=12, *, speculate=True, reuse=True, **params):
    params = SamplingParams(max_new_tokens=tokens, **{"ignore_eos": True, **params})
    return Ask(prompt=tuple(prompt), params=params, speculate=speculate, reuse=reuse)


async def answer(service, *asks, client="me"):
    """Tokens of each answer, by choice."""
    found = {choice: [] for choice in range(len(asks))}
    async with service.submit(asks, client=client) as ticket:
        async for event in ticket:
            if isinstance(event, Block):
                found[event.choice].extend(event.commit.tokens)
            else:
                assert isinstance(event, Ended), event
    return [found[choice] for choice in sorted(found)]


def alone(prompt, tokens=12, **params):
    decoder = DominoDecoder(make_target("llama"), None, small_tokenizer(), engine="reference")
    params = {"ignore_eos": True, **params}
    return decoder.generate(list(prompt), max_new_tokens=tokens, **params).tokens


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("drafter", [True, False])
def test_many_at_once_write_what_each_writes_alone(engine, drafter):
    async def check(service):
        wanted = [(prompt, 3 + 2 * number) for number, prompt in enumerate(PROMPTS)]
        found = await answer(service, *(ask(*each) for each in wanted))
        assert found == [alone(*each) for each in wanted]

    serving(check, engine=engine, drafter=drafter)


def test_each_row_has_its_own_parameters():
    async def check(service):
        params = [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.2, "top_k": 4, "seed": 6}]
        asks = [ask(PROMPTS[1], **each) for each in params]
        expected = [alone(PROMPTS[1], **each, accept="coupled") for each in params]
        assert await answer(service, *asks) == expected
        assert len({tuple(tokens) for tokens in expected}) == 3

    serving(check)


def test_one_joins_in_mid_flight_and_commits_before_an_earlier_one_ends():
    async def check(service):
        order = []

        async def listen(name, ticket):
            async for event in ticket:
                order.append((name, type(event)))  # noqa: PERF401 (others write here meanwhile)

        early = service.submit([ask(PROMPTS[0], 110)], client="a")
        task = asyncio.create_task(listen("early", early))
        while not order:
            await asyncio.sleep(0)
        late = service.submit([ask(PROMPTS[1], 5)], client="b")
        await asyncio.gather(task, listen("late", late))
        assert order.index(("late", Block)) < order.index(("early", Ended))
        assert order.index(("late", Ended)) < order.index(("early", Ended))

    serving(check)


def test_leaving_frees_the_slot():
    async def check(service):
        async with service.submit([ask(PROMPTS[0], 120)], client="a") as ticket:
            async for event in ticket:
                assert isinstance(event, Block)
                break
        assert (await answer(service, ask(PROMPTS[1])))[0] == alone(PROMPTS[1])

    serving(check, slots=1)


def test_a_prefix_is_read_once():
    async def check(service):
        first = PROMPTS[5]
        text = (await answer(service, ask(first)))[0]
        follow_up = [*first, *text, 7, 8, 9]
        there = len(first) + len(text) - 1  # the last token has no states yet
        for asked, expected in ((ask(follow_up), there), (ask(follow_up, reuse=False), 0)):
            cached, tokens = set(), []
            async with service.submit([asked], client="me") as ticket:
                async for event in ticket:
                    if isinstance(event, Block):
                        cached.add(event.cached)
                        tokens.extend(event.commit.tokens)
            assert tokens == alone(follow_up)
            assert cached == {expected}

    serving(check)


def test_choices_of_one_prompt_read_it_once():
    async def check(service):
        cached = {}
        asks = [ask(PROMPTS[5], temperature=1.0, seed=number) for number in range(3)]
        async with service.submit(asks, client="me") as ticket:
            async for event in ticket:
                if isinstance(event, Block):
                    cached[event.choice] = event.cached
        assert cached == {0: 0, 1: len(PROMPTS[5]) - 1, 2: len(PROMPTS[5]) - 1}

    serving(check)


def test_a_long_prompt_is_read_in_pieces_and_its_reader_may_leave_in_between(monkeypatch):
    monkeypatch.setattr(lanes, "_CPU_CHUNK", 4)

    async def check(service):
        lane = service.worker._tracks[True].lane
        held = asyncio.Event()
        loop, turn = asyncio.get_running_loop(), lane.turn

        def watched(results):
            turn(results)
            if lane._reading is not None:
                loop.call_soon_threadsafe(held.set)

        lane.turn = watched
        early = service.submit([ask(PROMPTS[0], 60)], client="a")
        leaving = service.submit([ask(PROMPTS[5])], client="b")
        await held.wait()
        leaving.cancel()
        async for event in early:
            if isinstance(event, Ended):
                break
        assert (await answer(service, ask(PROMPTS[5])))[0] == alone(PROMPTS[5])
        assert lane._engine.free == 3

    serving(check)


def test_what_the_engine_refuses_fails_alone():
    """Processors cannot come over HTTP, but whoever calls the service may try."""

    async def check(service):
        bad = ask(PROMPTS[0], processors=(lambda ids, scores: scores,))
        ticket = service.submit([ask(PROMPTS[1]), bad], client="me")
        ends = {event.choice: event async for event in ticket if not isinstance(event, Block)}
        assert isinstance(ends[0], Ended)
        assert "logits processors of its own" in str(ends[1].error)

    serving(check)


def test_plain_rows_run_beside_the_others():
    async def check(service):
        plain, drafted = await answer(
            service, ask(PROMPTS[1], 40, speculate=False), ask(PROMPTS[1], 40)
        )
        assert plain == drafted == alone(PROMPTS[1], 40)
        assert service.worker.slots == 6
        assert service.facts()["slots"] == 3, "what --slots says, whoever was here"

    serving(check)


def test_plain_rows_have_as_many_slots_as_the_others_where_there_is_room():
    async def check(service):
        await answer(service, ask(PROMPTS[1], 4, speculate=False))
        assert service.worker.slots == 12

    serving(check, slots=6)


def test_plain_rows_never_draft():
    async def check(service):
        async with service.submit([ask(PROMPTS[1], 20, speculate=False)], client="me") as ticket:
            async for event in ticket:
                if isinstance(event, Block):
                    assert len(event.commit.tokens) == 1
                else:
                    assert not event.stats.drafted

    serving(check)


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        ([1] * 61, 1, "the prompt has 61 tokens; this server takes 60"),
        ([1] * 10, 101, "101 new tokens are asked for; this server gives 100"),
        ([1] * 50, 90, "together more than the context of 128.*at most 78"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(prompt, tokens, words):
    async def check(service):
        with pytest.raises(TooLongError, match=words):
            service.submit([ask(prompt, tokens)], client="me")

    serving(check, max_prompt_tokens=60, max_new_tokens=100)


@pytest.mark.parametrize("prompt", [[], [97], [-1]])
def test_wrong_tokens_are_refused_at_once(prompt):
    async def check(service):
        with pytest.raises(InputError):
            service.submit([ask(prompt)], client="me")

    serving(check)


def test_the_reference_loop_keeps_to_the_targets_context():
    with pytest.raises(InputError, match="context is 999; the target was made for 256"):
        make_service(engine="reference", context=999)


def test_too_many_are_sent_away():
    async def check(service):
        asks = [ask(PROMPTS[0], 100)] * 4
        ticket = service.submit(asks, client="me")
        with pytest.raises(BusyError):
            service.submit(asks, client="me")
        ticket.cancel()

    serving(check, max_queue=2)


def test_a_stopped_service_takes_nothing_and_leaves_nothing():
    async def check(service):
        ticket = service.submit([ask(PROMPTS[0], 120)], client="me")
        await service.stop(0)
        events = [event async for event in ticket]
        assert isinstance(getattr(events[-1], "error", None), StoppingError)
        with pytest.raises(StoppingError):
            service.submit([ask(PROMPTS[0])], client="me")
        assert service.state == "stopping"

    serving(check)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Job]


def test_what_anybody_may_know():
    async def check(service):
        facts = service.facts()
        assert facts["model"] == "tiny"
        assert facts["speculates"]
        assert facts["slots"] == 3
        assert facts["context"] == 128
        assert service.encode_text("the fox") == tuple(small_tokenizer()("the fox")["input_ids"])
        chat = service.encode_chat([{"role": "user", "content": "hi"}], {})
        assert chat[-1] == small_tokenizer().convert_tokens_to_ids("<|assistant|>")

    serving(check)
