from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from selectors import EVENT_READ

import pytest

from echo_hub.net import turns
from echo_hub.net.turns import FairSelector

NUMBER = 10


@pytest.fixture
def readable() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(NUMBER):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs).send(b"x")
            found.append(ours)
        yield found


def test_guest_sockets_take_turns_and_own_sockets_have_each_turn(
    readable: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "AT_ONCE", 3)
    own, *guests = readable
    told: list[int] = []
    with FairSelector() as selector:
        for one in readable:
            selector.register(one, EVENT_READ)
        selector.guests.update(one.fileno() for one in guests)
        for _ in range(3):
            ready = [key.fd for key, _ in selector.select(0)]
            assert ready[0] == own.fileno() and len(ready) == 1 + 3
            told += ready[1:]
        assert sorted(told) == sorted(one.fileno() for one in guests), "each once before any twice"
        for one in guests[2:]:
            one.recv(1)
        assert {key.fd for key, _ in selector.select(0)} == {one.fileno() for one in (own, *guests[:2])}


async def serve_one() -> None:
    connected, lost = asyncio.Event(), asyncio.Event()

    class Guest(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            turns.came(transport)
            self.transport = transport
            connected.set()

        def connection_lost(self, exc: Exception | None) -> None:
            turns.left(self.transport)
            lost.set()

    server = await asyncio.get_running_loop().create_server(Guest, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await connected.wait()
        assert len(turns._guests()) == 1
        writer.close()
        await lost.wait()
        assert turns._guests() == set()


@pytest.mark.skipif(turns.loop_factory is None, reason="the loop has no selector here")
def test_a_guest_is_known_until_it_has_left() -> None:
    with asyncio.Runner(loop_factory=turns.loop_factory) as runner:
        runner.run(asyncio.wait_for(serve_one(), 60))


def test_other_loops_have_none() -> None:
    asyncio.run(asyncio.wait_for(nobody(), 60))


async def nobody() -> None:
    assert turns._guests() == set()
