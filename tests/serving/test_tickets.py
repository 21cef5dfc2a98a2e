"""A ticket ends for whoever waits, whatever comes late."""

import asyncio

from domino_spec.decoding import Commit, RowStats
from domino_spec.serving.asks import Block, Ended
from domino_spec.serving.tickets import Ticket

BLOCK = Block(choice=0, commit=Commit(0, (1,), 0, 0, None), cached=0)
END = Ended(choice=0, reason="length", stats=RowStats())


def in_a_loop(check):
    async def run():
        return await asyncio.wait_for(check(), 30)

    return asyncio.run(run())


async def rest_of(ticket):
    return [event async for event in ticket]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_it_ends_behind_the_last_choices_end():
    async def check():
        ticket = Ticket(2, lambda jobs: None)
        for event in (BLOCK, END, BLOCK, END):
            ticket.deliver(event)
        assert await rest_of(ticket) == [BLOCK, END, BLOCK, END]
        assert await rest_of(ticket) == []

    in_a_loop(check)


def test_who_waits_hears_of_a_cancellation():
    async def check():
        cancelled = []
        ticket = Ticket(1, cancelled.append)
        reader = asyncio.ensure_future(rest_of(ticket))
        ticket.deliver(BLOCK)
        await settle()
        ticket.cancel()
        ticket.cancel()
        assert await reader == [BLOCK]
        assert cancelled == [ticket.jobs]  # once

    in_a_loop(check)


def test_what_comes_behind_a_cancellation_is_heard_by_nobody():
    async def check():
        ticket = Ticket(1, lambda jobs: None)
        reader = asyncio.ensure_future(rest_of(ticket))
        await settle()
        ticket.deliver(END)  # on its way when the ticket is cancelled
        ticket.cancel()
        assert await reader == []
        await settle()
        assert await rest_of(ticket) == []

    in_a_loop(check)


def test_a_loop_that_is_gone_hears_nothing():
    async def check():
        return Ticket(1, lambda jobs: None)

    in_a_loop(check).deliver(BLOCK)
