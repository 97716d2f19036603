"""A listening socket must close connections above the allowed rate before the server keeps any state for them."""

from __future__ import annotations

import socket

import pytest

from echo_hub.net.listening import TURNED_AWAY_AT_ONCE, ListeningSocket, listen


@pytest.fixture
def clients():
    opened: list[socket.socket] = []
    yield opened
    for one in opened:
        one.close()


class Rates:
    """Admits connections of all addresses but `refused`."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.asked: list[str] = []

    def admits(self, host: str) -> bool:
        self.asked.append(host)
        return host not in self.refused


async def listening(rates: Rates) -> ListeningSocket:
    (one,) = await listen("127.0.0.1", 0, rates)
    one.setblocking(False)
    return one


async def test_a_connection_over_the_rate_is_closed_and_the_next_is_served(clients):
    rates = Rates("127.0.0.1")
    with await listening(rates) as one:
        for host in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
            clients.append(socket.create_connection(one.getsockname(), timeout=30, source_address=(host, 0)))
        connection, address = one.accept()
        with connection:
            assert address == clients[2].getsockname()
        assert rates.asked == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
        assert [client.recv(1) for client in clients[:2]] == [b"", b""]
        with pytest.raises(BlockingIOError):
            one.accept()


async def test_a_flood_takes_no_whole_turn_of_the_event_loop(clients):
    rates = Rates("127.0.0.1")
    with await listening(rates) as one:
        for _ in range(TURNED_AWAY_AT_ONCE + 3):
            clients.append(socket.create_connection(one.getsockname(), timeout=30))
        for expected in (TURNED_AWAY_AT_ONCE, TURNED_AWAY_AT_ONCE + 3):
            with pytest.raises(BlockingIOError):
                one.accept()
            assert len(rates.asked) == expected


async def test_an_address_that_cannot_be_had_leaves_nothing_open(clients):
    with await listening(Rates()) as one, pytest.raises(OSError, match="in use"):
        await listen("127.0.0.1", one.getsockname()[1], Rates())


async def test_a_host_of_several_addresses_has_a_socket_for_each():
    opened = await listen("", 0, Rates())
    families = {one.family for one in opened}
    for one in opened:
        one.close()
    assert socket.AF_INET in families
    assert len(families) == len(opened)


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the system has no shared ports")
async def test_a_port_is_shared_only_by_sockets_that_agree():
    (first,) = await listen("127.0.0.1", 0, Rates(), shared=True)
    with first:
        port = first.getsockname()[1]
        (second,) = await listen("127.0.0.1", port, Rates(), shared=True)
        with second, pytest.raises(OSError):
            await listen("127.0.0.1", port, Rates())
