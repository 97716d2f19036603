"""One local port, as hole punching needs it: connections from it to hub and peer, and its listening sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from echo_node.net import local_port
from echo_node.net.local_port import MOST_TRIES, LocalPort
from echo_shared.errors import EchoError
from tests.echo_hub.net.certificates import Authority
from tests.echo_node.net.punching_parts import PATH, FakeHub, opened

HERE = "127.0.0.1"
PATIENCE_S = 30.0


@pytest.fixture
async def hub() -> AsyncIterator[FakeHub]:
    async with opened(FakeHub()) as hub:
        yield hub


@contextlib.contextmanager
def bound(host: str = HERE) -> Iterator[LocalPort]:
    port = LocalPort(host)
    try:
        port.open()
        yield port
    finally:
        port.close()


async def first(port: LocalPort, *addresses: tuple[str, int], seconds: float = PATIENCE_S) -> socket.socket | None:
    async with aclosing(port.connections(addresses, seconds=seconds)) as found:
        async for connection in found:
            return connection
    return None


async def test_the_hub_sees_the_port(hub: FakeHub) -> None:
    with bound() as port:
        await port.learn(hub.url + PATH)
        assert port.sightings == [f"{HERE} {port.number} 0 signed"]
        assert (port.public_hosts, port.local_hosts) == ([HERE], [HERE])
    assert hub.requests[0].startswith(f"GET {PATH} HTTP/1.1\r\nHost: {hub.url.removeprefix('http://')}\r\n")


async def test_a_hub_with_tls_is_asked_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Authority(tmp_path).server()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(files.certificate, files.key)
    async with opened(FakeHub(), tls=theirs) as hub:
        with bound() as port:
            await port.learn(hub.url + PATH)
            assert port.sightings == [], "nothing trusts this certificate"
        monkeypatch.setattr(local_port, "_tls_context", lambda: ssl.create_default_context(cafile=files.authority))
        with bound() as port:
            await port.learn(hub.url + PATH)
            assert port.sightings == [f"{HERE} {port.number} 0 signed"]


async def test_two_ports_connect_to_each_other_whoever_begins() -> None:
    """On loopback, a port without a listening socket would refuse the connection."""
    with bound() as one, bound() as other:
        ends = await asyncio.gather(first(one, (HERE, other.number)), first(other, (HERE, one.number)))
        for end, port, peer in zip(ends, (one, other), (other, one), strict=True):
            assert end is not None
            assert (end.getsockname(), end.getpeername()) == ((HERE, port.number), (HERE, peer.number))
    for end in ends:
        assert end is not None
        end.close()


async def test_a_connection_outlives_its_port() -> None:
    with socket.create_server((HERE, 0)) as peer:
        with bound() as port:
            here = await first(port, peer.getsockname())
        assert here is not None
        there, _ = peer.accept()
        with here, there:
            there.settimeout(PATIENCE_S)
            here.send(b"still here")
            assert there.recv(100) == b"still here"


async def test_a_stranger_is_turned_away() -> None:
    with bound() as port:
        waiting = asyncio.create_task(first(port, ("127.0.0.9", 1_025), seconds=0.5))
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(HERE, port.number)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert await waiting is None


async def test_the_attempt_ends_when_its_time_is_over() -> None:
    with bound() as port:
        assert await first(port, (HERE, 1), seconds=0.05) is None
        assert await first(port, ("::1", 1_024), seconds=0.05) is None, "the port is for IPv4"


async def test_a_refusing_address_gets_few_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_port, "_AGAIN_S", 0.0)
    tries = 0
    with socket.socket() as closed, bound() as port:
        closed.bind((HERE, 0))
        made = port._socket

        def counted(family: int, host: str) -> socket.socket:
            nonlocal tries
            tries += 1
            return made(family, host)

        monkeypatch.setattr(port, "_socket", counted)
        assert await first(port, closed.getsockname(), seconds=0.5) is None
    assert tries == MOST_TRIES


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nno!\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + b"x" * 9999,
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nnot an a",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xff",
        b"x" * 20_000,
        b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    ],
    ids=range(9),
)
async def test_an_odd_answer_is_no_sighting(answer: bytes) -> None:
    async with opened(FakeHub(answer=answer)) as hub:
        with bound() as port:
            await port.learn(hub.url + PATH)
            assert port.sightings == []


async def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_port, "SIGHTING_S", 0.05)
    async with opened(FakeHub(pause_s=60)) as hub:
        with bound() as port:
            await port.learn(hub.url + PATH)
            assert port.sightings == []


async def test_all_addresses_include_those_of_ipv6(hub: FakeHub) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    for host in ("", "0.0.0.0"):
        with bound(host) as port:
            await port.learn(hub.url + PATH)
            assert len(port.sightings) == 1, "the hub has only IPv4"
            assert socket.AF_INET in port._hosts


async def test_a_port_cannot_be_bound_at_a_foreign_address() -> None:
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(OSError) as failed:
            LocalPort(host).open()
        assert not isinstance(failed.value, EchoError)
