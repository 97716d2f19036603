"""Hole punching between two nodes and a hub on loopback. `tests/end_to_end/test_through_routers.py` has routers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from ipaddress import ip_interface

import pytest

from echo_node.net import hole_punching, mesh
from echo_node.net.hole_punching import (
    ANSWER_AGAIN_LIMIT_S,
    ANSWER_AGAIN_S,
    LASTING_S,
    MOST_ATTEMPTS,
    AnswerWaits,
    HolePunching,
    usable,
)
from echo_node.net.local_port import LocalPort
from echo_shared.process.backoff import backoff_s
from echo_shared.wire.messages import Meet, MeetWanted
from tests.echo_node.net.punching_parts import PATH, FakeHub, Line, opened

HERE = "127.0.0.1"
PATIENCE_S = 30.0


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with opened(FakeHub()) as hub:
        yield hub


class Pair:
    """Node a, which asks, and node b, which answers."""

    def __init__(self, hub: FakeHub) -> None:
        self.a, self.b = Line(hub, "a"), Line(hub, "b")
        self.a.peer, self.b.peer = self.b, self.a
        self.asking, self.answering = HolePunching(HERE), HolePunching(HERE)
        self.asking.use(self.a, PATH)
        self.answering.use(self.b, PATH)

    async def answer(self) -> list[socket.socket]:
        meet = await self.b.heard.get()
        return [connection async for connection in self.answering.answer(meet)]

    async def pass_answer(self) -> None:
        self.asking.heard(await self.a.heard.get())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hole_punching, "CONNECT_S", 0.5)
    monkeypatch.setattr(hole_punching, "ANSWER_S", 0.5)


async def test_two_nodes_connect(hub: FakeHub) -> None:
    pair = Pair(hub)
    async with asyncio.timeout(PATIENCE_S):
        asked, answered, _ = await asyncio.gather(pair.asking.ask("b"), pair.answer(), pair.pass_answer())
    assert asked is not None
    assert asked.getpeername() in [end.getsockname() for end in answered]
    (want,), (answer) = pair.a.said, pair.b.said[0]
    assert (want.node_id, want.answers, answer.node_id, answer.answers) == ("b", False, "a", True)
    assert asked.getsockname() == (HERE, want.port)
    for end in (asked, *answered):
        end.close()


async def test_a_peer_that_does_not_answer_is_given_up(hub: FakeHub) -> None:
    pair = Pair(hub)
    assert await pair.asking.ask("b") is None
    pair.asking.heard(Meet(node_id="b", addresses=((HERE, 5_000),), answers=True))  # Too late.
    assert not pair.asking._asked


async def test_a_peer_that_cannot_be_reached_is_given_up(hub: FakeHub) -> None:
    pair = Pair(hub)
    asking = asyncio.create_task(pair.asking.ask("b"))
    await pair.b.heard.get()
    pair.asking.heard(Meet(node_id="c", addresses=((HERE, 5_000),), answers=True))
    pair.asking.heard(Meet(node_id="b", addresses=((HERE, 1_024),), answers=True))
    pair.asking.heard(Meet(node_id="b", addresses=((HERE, 1_025),), answers=True))
    assert await asking is None


async def test_without_a_public_address_the_hub_is_not_asked() -> None:
    async with opened(FakeHub(answer=b"HTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx")) as hub:
        pair = Pair(hub)
        assert await pair.asking.ask("b") is None
        meet = Meet(node_id="a", addresses=((HERE, 5_000),))
        assert [one async for one in pair.answering.answer(meet)] == []
    assert pair.a.said == pair.b.said == []


async def test_nothing_happens_without_a_hubs_help(hub: FakeHub) -> None:
    pair = Pair(hub)
    assert pair.asking.is_on
    pair.asking.use(pair.a, "")
    assert not pair.asking.is_on and not HolePunching(HERE).is_on
    assert await pair.asking.ask("b") is None
    assert hub.requests == []


async def test_attempts_at_the_same_time_are_bounded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ports = most = 0

    class CountedPort(LocalPort):
        def open(self) -> None:
            nonlocal open_ports, most
            super().open()
            open_ports += 1
            most = max(most, open_ports)

        def close(self) -> None:
            nonlocal open_ports
            open_ports -= 1
            super().close()

    monkeypatch.setattr(hole_punching, "LocalPort", CountedPort)
    monkeypatch.setattr(hole_punching, "ANSWER_S", 0.02)
    pair = Pair(hub)

    async def ask(number: int) -> None:
        async with pair.asking.attempts:
            assert await pair.asking.ask(f"n{number}") is None

    await asyncio.gather(*(ask(number) for number in range(4 * MOST_ATTEMPTS)))
    assert (most, open_ports) == (MOST_ATTEMPTS, 0)
    monkeypatch.setattr(hole_punching, "ANSWER_S", 0.8)
    monkeypatch.setattr(hole_punching, "CONNECT_S", 0.15)
    most = 0

    async def answer(number: int) -> None:
        async for _ in pair.answering.answer(Meet(node_id=f"n{number}", addresses=(("10.1.1.1", 5_000),))):
            raise AssertionError("nobody is there")

    await asyncio.gather(*(answer(number) for number in range(8 * MOST_ATTEMPTS)))
    assert (most, open_ports) == (MOST_ATTEMPTS, 0)
    assert MOST_ATTEMPTS < len(pair.b.said) < 8 * MOST_ATTEMPTS, "some have waited, others have given up"


async def test_asks_and_answers_share_the_limit(hub: FakeHub) -> None:
    pair = Pair(hub)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MOST_ATTEMPTS):
            await stack.enter_async_context(pair.answering.attempts)
        answer = pair.answering.answer(Meet(node_id="a", addresses=((HERE, 5_000),)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(answer)
    assert pair.b.said == []


def test_a_peer_that_asks_again_waits_longer_each_time() -> None:
    waits, now, passed = AnswerWaits(), 100.0, []
    for tenth in range(1_000):
        if waits.take("a", now=now + tenth / 10):
            passed.append(tenth / 10)
    assert passed == [0, *(ANSWER_AGAIN_S * factor for factor in (1, 3, 7, 15, 31, 63))]
    assert waits.take("b", now=now), "another peer"
    waits.linked("a", lasted_s=LASTING_S / 2)
    assert not waits.take("a", now=now + 100)
    waits.linked("a", lasted_s=LASTING_S)
    assert waits.take("a", now=now + 100)


def test_an_honest_peer_is_always_answered() -> None:
    waits, now = AnswerWaits(), 0.0
    for attempt in range(20):
        assert waits.take("a", now=now)
        now += backoff_s(attempt, 1.0, first_s=mesh.PUNCH_AGAIN_S, limit_s=mesh.PUNCH_LIMIT_S)
    assert not waits.take("a", now=now - ANSWER_AGAIN_LIMIT_S)


def addresses(public: str, local: str, *told: str) -> list[str]:
    """Return the usable ones of these addresses, for a node with this public and this local address."""
    with ExitStack() as stack:
        port = stack.enter_context(closing(LocalPort(HERE)))
        port.public_hosts, port.local_hosts = [public], [local]
        meet = Meet(node_id="b", addresses=tuple((host, 5_000) for host in told))
        assert all(number == 5_000 for _, number in usable(meet, port))
        return [host for host, _ in usable(meet, port)]


def test_addresses_with_a_special_meaning_are_not_used() -> None:
    special = ("127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.1.1", "255.255.255.255", "hub.example", "")
    for told in (*special, "::1", "::", "ff02::1", "fe80::1", "::ffff:127.0.0.1"):
        assert addresses("8.8.1.1", "192.168.1.2", "8.8.1.1", told) == ["8.8.1.1"]
    assert addresses("8.8.1.1", "192.168.1.2", "8.8.2.2", "2600::1") == ["8.8.2.2", "2600::1"]


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine in a home network, with another network for its containers."""
    interfaces = [ip_interface(text) for text in ("127.0.0.1/8", "192.168.1.2/24", "fd00::2/64", "172.17.0.1/16")]
    monkeypatch.setattr(hole_punching, "own_interfaces", lambda: interfaces)


@pytest.mark.usefixtures("at_home")
def test_private_addresses_are_used_in_the_same_network_only() -> None:
    assert addresses("8.8.1.1", "192.168.1.2", "192.168.1.7", "8.8.2.2") == ["8.8.2.2"]
    for foreign in ("10.0.0.7", "172.17.0.2", "fd00::7"):
        assert addresses("8.8.1.1", "192.168.1.2", "8.8.1.1", "192.168.1.7", foreign) == ["8.8.1.1", "192.168.1.7"]
        assert addresses("192.168.1.2", "192.168.1.2", "192.168.1.7", foreign) == ["192.168.1.7"]
    assert addresses("8.8.1.1", "fd00::2", "8.8.1.1", "fd00::7") == ["8.8.1.1", "fd00::7"]


@pytest.mark.usefixtures("at_home")
def test_a_node_connects_neither_to_itself_nor_to_its_router() -> None:
    assert addresses("8.8.1.1", "192.168.1.2", "8.8.1.1", "192.168.1.2", "192.168.1.1") == ["8.8.1.1"]


@pytest.mark.usefixtures("at_home")
def test_a_proxys_address_stands_for_no_common_network() -> None:
    """Behind a proxy that is not in `trusted_proxies`, the hub sees all nodes at the proxy's address."""
    for proxy in (HERE, "10.9.9.9"):
        assert addresses(proxy, "192.168.1.2", "192.168.1.7") == []


def test_loopback_is_used_by_nodes_on_the_hubs_machine_only() -> None:
    assert addresses(HERE, HERE, HERE) == [HERE]
    assert addresses("8.8.1.1", "192.168.1.2", "8.8.1.1", HERE) == ["8.8.1.1"]


async def test_a_wanted_message_fits_the_wire(hub: FakeHub) -> None:
    pair = Pair(hub)
    await pair.asking.ask("b")
    (said,) = pair.a.said
    assert MeetWanted.model_validate(said.model_dump()) == said
