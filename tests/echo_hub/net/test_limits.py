"""A real server's limits against thousands of incomplete requests, bodies that never come, and answers that are never
read.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net import limits
from echo_hub.net.client_address import place_of
from echo_hub.net.connection import BODY_S, HANDSHAKE_S, HEAD_BYTES, HEAD_S, IDLE_S, CloseReason
from echo_hub.net.limits import MOST_OF_NODE
from echo_hub.net.server import Server
from echo_shared.errors import RefusedError
from tests.echo_hub.net.certificates import Authority

DEADLINE_S = 60.0
HALF = b"GET /short HTTP/1.1\r\nHost: x\r\nX-Half:"
WHOLE = b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_BYTES = 28 * 2**20
"""More bytes than the system buffers for a connection without a reader."""


class Client:
    """A raw socket that sends and reads exactly what a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> Client:
        self.writer.write(data)
        return self

    async def status(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await self.reader.readexactly(length)
        return int(head.split()[1])

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            try:
                while await self.reader.read(2**16):
                    pass
            except ConnectionError:
                return


async def turns() -> AsyncIterator[None]:
    while True:
        yield await asyncio.sleep(0)


class Site:
    """A server with a clock that the test sets."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.limits = server.limits
        self.at = 1_000.0
        self.clients: list[Client] = []
        self.kept = asyncio.Event()
        """A request for `/long` is answered when this event is set."""
        self.limits.now = lambda: self.at

    async def client(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.server.port))
        self.clients.append(client)
        return client.say(data)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            async for _ in turns():
                if condition():
                    return

    async def settled(self) -> None:
        """Wait until the server has read all earlier requests: send another request, and wait for its answer."""
        async with aiohttp.ClientSession(self.server.url) as http, http.get("/short") as answer:
            assert answer.status == 200
        await self.until(lambda: all(one.transport is not None for one in self.limits._all))

    def after(self, seconds: float) -> None:
        """Advance the clock by `seconds` and check deadlines, in two steps, so that the server sees progress made in
        between.
        """
        for _ in range(2):
            self.at += seconds / 2
            self.limits.sweep()


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    file = tmp_path / "large"
    file.write_bytes(bytes(LARGE_BYTES))
    opened: list[Site] = []

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Site]:
        site = Site(Server(ServerConfig.model_validate({"port": 0, **settings})))

        async def long(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await site.kept.wait()
            return response

        async def node(request: web.Request) -> web.StreamResponse:
            try:
                node_id = request.match_info["node"]
                site.limits.vouch(request, node_id, is_known=node_id.startswith("known"))
            except RefusedError as error:
                raise web.HTTPTooManyRequests(text=error.what) from error
            return await long(request)

        async def short(_: web.Request) -> web.Response:
            return web.Response(text="here")

        async def large(_: web.Request) -> web.Response:
            return web.Response(body=bytes(LARGE_BYTES))

        async def of_file(_: web.Request) -> web.FileResponse:
            return web.FileResponse(file)

        async def body(request: web.Request) -> web.Response:
            return web.Response(text=str(len(await request.read())))

        await site.server.open(
            [
                web.get("/short", short),
                web.get("/large", large),
                web.get("/file", of_file),
                web.get("/long", long),
                web.get("/node/{node}", node),
                web.post("/body", body),
            ]
        )
        opened.append(site)
        try:
            yield site
        finally:
            site.kept.set()
            for client in site.clients:
                client.writer.transport.abort()
            await site.server.close()

    yield serve


async def test_half_a_request_is_not_waited_for(serving: Any) -> None:
    async with serving() as site:
        halves = [await site.client(data) for data in (b"", b"G", HALF) for _ in range(20)]
        whole = await site.client(WHOLE)
        assert await whole.status() == 200
        site.after(HEAD_S)
        assert site.limits.num_open == 61
        site.after(0.1)
        for half in halves:
            await half.ended()
        assert site.limits.cuts == {CloseReason.HEAD_TOO_LATE: 60}
        assert await whole.say(WHOLE).status() == 200, "a client that completed a request may send another"


async def test_a_header_in_every_packet_gains_no_time(serving: Any) -> None:
    async with serving() as site:
        slow = await site.client(HALF)
        await site.settled()
        for _ in range(3):
            site.at += HEAD_S / 2
            slow.say(b" x\r\nX-More:")
            await site.settled()
            site.limits.sweep()
        await slow.ended()
        assert site.limits.cuts[CloseReason.HEAD_TOO_LATE] == 1


async def test_a_thousand_sockets_of_one_address_keep_no_client_out(serving: Any) -> None:
    async with serving(max_strangers_per_address=512, connections_per_s_per_address=1_000) as site:
        for _ in range(1_000):
            await site.client(HALF)
        honest = await site.client(WHOLE)
        assert await honest.status() == 200
        assert site.limits.num_open == site.limits.num_strangers == 512
        assert site.limits.cuts == {CloseReason.TOO_MANY_OF_ADDRESS: 489}
        assert await honest.say(WHOLE).status() == 200


async def test_if_no_connection_is_idle_the_newest_is_refused(serving: Any) -> None:
    async with serving(max_strangers_per_address=4) as site:
        for _ in range(4):
            await site.client(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        await site.until(lambda: not site.limits._waiting and site.limits.num_open == 4)
        await (await site.client(WHOLE)).ended()
        assert site.limits.num_open == 4 and site.limits.cuts == {CloseReason.TOO_MANY_OF_ADDRESS: 1}
        site.clients[0].writer.transport.abort()
        await site.until(lambda: site.limits.num_open == 3)
        assert await (await site.client(WHOLE)).status() == 200


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_connections": 16}, CloseReason.TOO_MANY), ({"max_strangers": 16}, CloseReason.TOO_MANY_STRANGERS)],
)
async def test_idle_connections_make_room_oldest_first(
    serving: Any, settings: dict[str, int], reason: CloseReason
) -> None:
    async with serving(**settings) as site:
        idle = [await site.client(WHOLE) for _ in range(16)]
        for client in idle:
            assert await client.status() == 200
        assert await (await site.client(WHOLE)).status() == 200
        await idle[0].ended()
        assert await idle[1].say(WHOLE).status() == 200
        assert site.limits.cuts == {reason: 1} and site.limits.num_open == 16


async def test_nodes_are_limited_by_node_and_by_address_and_are_no_strangers(serving: Any) -> None:
    async with serving(max_strangers_per_address=4, max_nodes_per_address=40) as site:
        for node in ["a"] * MOST_OF_NODE + ["b"] * 8:
            await site.client(f"GET /node/{node} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await site.until(lambda: site.limits.num_strangers == 0 and len(site.limits._waiting) == 0)
        for node, reason in (("a", CloseReason.TOO_MANY_OF_NODE), ("c", CloseReason.TOO_MANY_OF_ADDRESS)):
            late = await site.client(f"GET /node/{node} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert await late.status() == 429
            assert site.limits.cuts[reason] == 1
            assert await late.say(WHOLE).status() == 200
        site.after(10 * IDLE_S)
        assert site.limits.num_open == 40, "a websocket has its own deadlines"


async def test_fresh_keys_leave_room_for_nodes_that_are_known(serving: Any) -> None:
    async with serving(max_connections=16) as site:

        async def comes(node: str) -> Client:
            return await site.client(f"GET /node/{node} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

        for number in range(12):
            await comes(f"fresh-{number}")
            await site.until(lambda number=number: site.limits.num_open == number + 1 and not site.limits.num_strangers)
        late = await comes("fresh-12")
        assert await late.status() == 429 and site.limits.cuts == {CloseReason.TOO_MANY_UNKNOWN: 1}
        for number in range(3):
            known = await comes(f"known-{number}")
            assert (await known.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await late.say(WHOLE).status() == 200, "strangers still have places"


async def test_a_slow_reader_makes_room_if_no_connection_is_idle(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_HELD_BYTES", 9 * LARGE_BYTES)
    async with serving(max_strangers=8) as site:
        slow = []
        for _ in range(8):
            slow.append(await site.client(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"))
            await slow[-1].reader.readuntil(b"\r\n\r\n")
            slow[-1].writer.transport.pause_reading()
        await site.until(lambda: len(site.limits._waiting) == 8)
        assert await (await site.client(WHOLE)).status() == 200
        assert site.limits.cuts == {CloseReason.TOO_MANY_STRANGERS: 1}
        slow[0].writer.transport.resume_reading()
        await slow[0].ended()
        slow[1].writer.transport.resume_reading()
        await slow[1].reader.readexactly(LARGE_BYTES)


async def test_a_head_without_end_is_not_read(serving: Any) -> None:
    async with serving() as site:
        flood = await site.client(b"GET /short HTTP/1.1\r\n" + (b"X-More: " + b"x" * 1_000 + b"\r\n") * 100)
        await site.until(lambda: any(one._is_paused for one in site.limits._all))
        (connection,) = site.limits._all
        assert connection._num_read <= HEAD_BYTES
        await site.settled()
        site.after(HEAD_S + 0.1)
        await flood.ended()
        assert site.limits.cuts == {CloseReason.HEAD_TOO_LATE: 1}


async def test_bytes_after_a_request_are_read_up_to_a_limit(serving: Any) -> None:
    async with serving() as site:
        await site.client(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n" + WHOLE * 10_000)
        await site.until(lambda: any(one._is_paused for one in site.limits._all))
        (connection,) = site.limits._all
        assert connection._num_read <= HEAD_BYTES
        site.kept.set()


async def test_many_requests_on_one_connection_are_all_answered(serving: Any) -> None:
    async with serving() as site:
        client = await site.client(WHOLE * 2_000)
        assert [await client.status() for _ in range(2_000)] == [200] * 2_000


async def test_a_body_is_read_whole_and_a_missing_one_is_not_awaited(serving: Any) -> None:
    async with serving() as site:
        head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n"
        quick, slow = await site.client(head + bytes(500_000)), await site.client(head + b"x")
        assert await quick.status() == 200
        await site.until(lambda: any(one._request is not None for one in site.limits._all))
        site.after(BODY_S)
        assert site.limits.num_open == 2
        site.after(0.1)
        await slow.ended()
        assert site.limits.cuts == {CloseReason.BODY_TOO_LATE: 1} and site.limits.num_open == 1


@pytest.mark.parametrize("path", ["/large", "/file"])
async def test_a_slow_reader_continues_and_a_silent_one_is_cut_off(
    serving: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/file" and sys.platform != "linux":
        pytest.skip("only Linux tells how far a file has come")
    monkeypatch.setattr(limits, "MOST_HELD_BYTES", 3 * LARGE_BYTES)
    async with serving() as site:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        slow, deaf = await site.client(request), await site.client(request)
        for client in (slow, deaf):
            await client.reader.readuntil(b"\r\n\r\n")
            client.writer.transport.pause_reading()
        await site.until(lambda: all(one._request is None and one.stage.value == "between" for one in site.limits._all))
        read = 0
        for _ in range(6):
            site.after(IDLE_S / 2)
            slow.writer.transport.resume_reading()
            while read % 2**21 or not read:
                read += len(await slow.reader.readexactly(2**18))
            read += len(await slow.reader.readexactly(2**18))
            slow.writer.transport.pause_reading()
        assert site.limits.cuts == {CloseReason.NOT_READING: 1} and site.limits.num_open == 1
        deaf.writer.transport.resume_reading()
        await deaf.ended()


async def test_unread_answers_are_held_for_few_strangers(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_HELD_BYTES", 3 * LARGE_BYTES)
    async with serving() as site:
        deaf = []
        for _ in range(6):
            deaf.append(await site.client(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"))
            await deaf[-1].reader.readuntil(b"\r\n\r\n")
            deaf[-1].writer.transport.pause_reading()
        await site.until(lambda: site.limits.cuts[CloseReason.TOO_MUCH_HELD] == 3)
        assert await (await site.client(WHOLE)).status() == 200
        assert 2 * LARGE_BYTES < site.limits._num_held <= 3 * LARGE_BYTES
        for client in deaf[3:]:
            client.writer.transport.resume_reading()
            await client.reader.readexactly(LARGE_BYTES)
        await site.until(lambda: site.limits._num_held == 0)
        assert site.limits.cuts == {CloseReason.TOO_MUCH_HELD: 3} and site.limits.num_open == 4


async def test_idle_connections_are_closed_and_answering_ones_are_not(serving: Any) -> None:
    async with serving() as site:
        idle, long = await site.client(WHOLE), await site.client(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await idle.status() == 200
        await long.reader.readuntil(b"\r\n\r\n")
        for _ in range(4):
            site.after(IDLE_S / 2)
        await idle.ended()
        assert site.limits.num_open == 1 and site.limits.cuts == {}, "an idle end counts as no fault"


async def test_behind_a_proxy_each_client_counts_by_its_own_address(serving: Any) -> None:
    settings = {"trusted_proxies": ["127.0.0.1"], "max_strangers_per_address": 4, "max_strangers": 8}
    async with serving(**settings) as site:

        def asking(path: str, client: str) -> bytes:
            return f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {client}\r\n\r\n".encode()

        idle = [await site.client() for _ in range(20)]
        for number in range(4):
            await site.client(asking("/long", f"2001:db8::{number}"))
        await site.until(lambda: site.limits.num_strangers == 4)
        assert await idle[0].say(asking("/short", "2001:db8::9")).status() == 429
        assert await idle[0].say(asking("/short", "192.0.2.1")).status() == 200
        for _ in range(4):
            await site.client(asking("/long", "192.0.2.1"))
        await site.until(lambda: site.limits.num_strangers == 8)
        assert await idle[0].say(asking("/short", "192.0.2.2")).status() == 429
        site.after(10 * IDLE_S)
        assert site.limits.cuts == {CloseReason.TOO_MANY_OF_ADDRESS: 1, CloseReason.TOO_MANY_STRANGERS: 1}
        assert site.limits.num_open == 28, "the proxy decides how long its connections stay"
        assert site.limits.cuts == {CloseReason.TOO_MANY_OF_ADDRESS: 1, CloseReason.TOO_MANY_STRANGERS: 1}
        site.kept.set()
        await site.until(lambda: site.limits.num_strangers == 0)


async def test_counts_of_closed_connections_are_removed(serving: Any) -> None:
    async with serving() as site:
        for data in (HALF, WHOLE, b"no HTTP\r\n\r\n"):
            await site.client(data)
        for path in ("/long", "/node/a"):
            await site.client(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await site.until(lambda: site.limits._of_node and site.limits.num_open == 4)
        for client in site.clients:
            client.writer.transport.abort()
        await site.until(lambda: not site.limits.num_open)
        counted = (site.limits._strangers_of, site.limits._nodes_of, site.limits._of_node, site.limits._waiting)
        assert site.limits.num_strangers == 0 and not any(counted)


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::1", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_are_grouped_as_one_place(host: str, place: str) -> None:
    assert place_of(host) == place


async def test_new_connections_of_one_address_have_a_rate(serving: Any) -> None:
    async with serving(connections_per_s_per_address=2) as site:
        few = [await site.client(WHOLE) for _ in range(8)]
        for client in few:
            assert await client.status() == 200
        await (await site.client(WHOLE)).ended()
        assert site.limits.cuts == {CloseReason.TOO_FAST: 1}
        site.at += 0.5
        assert await (await site.client(WHOLE)).status() == 200, "open connections stay, and more may come soon"
        assert site.limits.num_open == 9


async def test_requests_have_a_rate_and_those_of_nodes_do_not_count(serving: Any) -> None:
    async with serving(requests_per_s_per_address=2) as site:
        client = await site.client()
        client.say(WHOLE * 16)
        assert [await client.status() for _ in range(9)] == [200] * 8 + [429]
        await client.ended()
        assert site.limits.cuts == {CloseReason.TOO_FAST_REQUESTS: 1}, (
            "requests waiting after the refused one were not answered"
        )
        assert await (await site.client(WHOLE)).status() == 429
        site.at += 0.5
        for _ in range(5):
            node = await site.client(b"GET /node/n HTTP/1.1\r\nHost: x\r\n\r\n")
            await node.reader.readuntil(b"\r\n\r\n")
        assert site.limits.cuts == {CloseReason.TOO_FAST_REQUESTS: 2}


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, dict[str, str]]:
    authority = Authority(tmp_path)
    files = authority.server()
    trusting = ssl.create_default_context(cafile=str(authority.path))
    return trusting, {"tls_certificate": str(files.certificate), "tls_key": str(files.key)}


async def test_half_a_tls_handshake_counts_and_is_not_waited_for(serving: Any, tls: Any) -> None:
    context, settings = tls
    async with serving(**settings) as site:
        halves = [await site.client(data) for data in (b"", b"\x16\x03\x01\x02\x00\x01") for _ in range(20)]
        async with aiohttp.ClientSession() as http, http.get(f"{site.server.url}/short", ssl=context) as answer:
            assert answer.status == 200
            assert site.limits.num_open == site.limits.num_strangers == 41
            site.after(HANDSHAKE_S)
            assert site.limits.num_open == 41
            site.after(0.1)
            for half in halves:
                await half.ended()
            assert site.limits.cuts == {CloseReason.HANDSHAKE_TOO_LATE: 40}
        await site.until(lambda: site.limits.num_open == 0)


async def test_unfinished_tls_handshakes_make_room_for_finished_ones(serving: Any, tls: Any) -> None:
    context, settings = tls
    async with serving(**settings, max_strangers_per_address=16) as site:
        for _ in range(40):
            await site.client()
        async with aiohttp.ClientSession() as http, http.get(f"{site.server.url}/short", ssl=context) as answer:
            assert answer.status == 200
        assert site.limits.cuts == {CloseReason.TOO_MANY_OF_ADDRESS: 25}


async def test_a_connection_without_tls_leaves_no_state(serving: Any, tls: Any) -> None:
    async with serving(**tls[1]) as site:
        for said in (WHOLE, b"\x16\x03\x01\x00\x05hello", b""):
            client = await site.client(said)
            client.writer.write_eof()
            await client.ended()
        gone = await site.client(b"\x16")
        await site.until(lambda: site.limits.num_open == 1)
        gone.writer.transport.abort()
        await site.until(lambda: site.limits.num_open == 0)
        assert site.limits.num_strangers == 0


async def test_too_many_handshakes_at_once_are_not_begun(
    serving: Any, tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_HANDSHAKES", 0)
    monkeypatch.setattr(limits, "HANDSHAKES_PER_S", 0.001)
    async with serving(**tls[1]) as site:
        await site.client()
        await (await site.client()).ended()
        assert site.limits.cuts == {CloseReason.TOO_MANY_HANDSHAKES: 1} and site.limits.num_open == 1


async def test_of_handshakes_under_way_the_oldest_makes_room(
    serving: Any, tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_UNDER_WAY", 2)
    context, settings = tls
    async with serving(**settings) as site:
        half, other = await site.client(), await site.client()
        await site.until(lambda: len(site.limits._under_way) == 2)
        async with aiohttp.ClientSession() as http:
            for _ in range(4):  # All four requests use one connection, so a finished request must not count any more.
                async with http.get(f"{site.server.url}/short", ssl=context) as answer:
                    assert answer.status == 200
            await half.ended()
            assert site.limits.cuts == {CloseReason.TOO_MANY_HANDSHAKES: 1} and site.limits.num_open == 2
        other.writer.transport.abort()
        await site.until(lambda: not site.limits._under_way and site.limits.num_open == 0)
