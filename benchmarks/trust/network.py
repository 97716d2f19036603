"""Attacks by whoever reaches the hub's port and has proven nothing: the hub goes on answering, and its memory stays.

Each says what the hub did, or raises `Unnoticed`. How long `/healthz` took meanwhile, and what the hub's memory grew
by, is measured around them (`site`).
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from benchmarks.trust.protocol import Unnoticed, Victim
from benchmarks.trust.stranger import Stranger
from echo_shared.messages import MAX_FRAME_BYTES
from echo_shared.process_memory import own_bytes
from echo_shared.swarm import read_torrent

SOCKETS: Final = 1_000
CLOSED_WITHIN_S: Final = 100.0
"""A connection may be kept for another request for a while; what is still open then stays for ever."""
UNREAD_S: Final = 20.0
UNREADERS: Final = 40
"""Of each kind of answer."""
LARGE: Final[Mapping[str, int]] = {
    "/leaderboard": 200,
    "/api/v1/leaderboard?limit=1000000": 200,
    "/api/v1/run": 200,
    "/static/uplot.min.js": 200,
}
"""The largest answers that anybody can have, and how many of them each client asks for."""
MOST_GROWTH_BYTES: Final = 100_000_000
"""Of the hub's memory, by what strangers do."""
UPGRADE: Final = (
    b"GET /node HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def sockets(victim: Victim, count: int, first_bytes: bytes) -> list[Streams]:
    """As many connections as the hub takes, each of which has said this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 512)), hard))
    address = urlsplit(victim.url)
    opened: list[Streams] = []
    for _ in range(count):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(first_bytes)
            opened.append((reader, writer))
    return opened


async def all_closed(opened: list[Streams], *, within_s: float = CLOSED_WITHIN_S) -> str:
    """Waits until the hub has closed them all."""
    began_at = time.monotonic()
    waits = [asyncio.create_task(_until_closed(reader)) for reader, _ in opened]
    _, pending = await asyncio.wait(waits, timeout=within_s)
    for waiting in pending:
        waiting.cancel()
    for _, writer in opened:
        writer.transport.abort()
    if pending:
        raise Unnoticed(f"{len(pending)} of {len(opened)} are still open after {within_s:.0f} s")
    return f"all {len(opened)} closed after {time.monotonic() - began_at:.1f} s"


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65_536):
            pass


async def silent_sockets(victim: Victim) -> str:
    """Connections that say nothing."""
    return await all_closed(await sockets(victim, SOCKETS, b""))


async def half_requests(victim: Victim) -> str:
    """Requests that break off in their headers."""
    return await all_closed(await sockets(victim, SOCKETS, b"GET / HTTP/1.1\r\nHost: x\r\nX-A: "))


async def half_bodies(victim: Victim) -> str:
    """Requests whose body never comes."""
    request = b"POST /api/v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc"
    return await all_closed(await sockets(victim, SOCKETS, request))


async def dripped_requests(victim: Victim) -> str:
    """A byte of a header now and then: each is progress, and none is the last."""
    opened = await sockets(victim, 100, b"GET / HTTP/1.1\r\nX: ")

    async def drip() -> None:
        while True:
            for _, writer in opened:
                with suppress(OSError):
                    writer.write(b"a")
            await asyncio.sleep(0.5)

    dripping = asyncio.create_task(drip())
    try:
        return await all_closed(opened)
    finally:
        dripping.cancel()


async def half_upgrades(victim: Victim) -> str:
    """Websockets are asked for without a proof, and nothing more is said."""
    return await all_closed(await sockets(victim, SOCKETS, UPGRADE))


async def frames_before_proof(victim: Victim) -> str:
    """A frame of the largest size on each connection, whose sender has proven nothing."""
    head = b"\x82\xff" + (MAX_FRAME_BYTES - 1).to_bytes(8) + bytes(4)
    opened = await sockets(victim, 60, UPGRADE + head)
    payload = bytes(2**20)

    async def fill(writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for _ in range(8):
                writer.write(payload)
                await writer.drain()

    await asyncio.wait([asyncio.create_task(fill(writer)) for _, writer in opened], timeout=20.0)
    return await all_closed(opened)


async def never_reads(victim: Victim) -> str:
    """A joined node that takes nothing of what the hub sends it: versions, and answers to what it asks."""
    node = await Stranger(victim.url).join()
    node.socket.transport.pause_reading()
    await node.report(0)
    began_at = time.monotonic()
    try:
        async with asyncio.timeout(CLOSED_WITHIN_S):
            while not node.socket.transport.is_closing():
                await node.report(0)
                await asyncio.sleep(0.2)
    except (TimeoutError, OSError, Exception) as error:
        if isinstance(error, TimeoutError):
            raise Unnoticed("it is still connected") from error
    finally:
        await node.close()
    return f"disconnected after {time.monotonic() - began_at:.0f} s"


async def unread_answers(victim: Victim) -> str:
    """Pages, lists, scripts and the base model are asked for by 200 clients, again and again, and not read."""
    member = await victim.stranger()
    assert member.welcome is not None
    base = member.welcome.base
    layout = read_torrent(base.torrent)
    largest, _ = max(layout.files, key=lambda file: file[1])
    seed = f"{base.web_seed_path}{layout.name}/{largest}"
    before, most = own_bytes(victim.site.hub.pid), 0
    unread: list[Streams] = []
    for path, answers in {**LARGE, seed: 4}.items():
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode()
        unread += await sockets(victim, UNREADERS, request * answers)
    for _, writer in unread:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(int(UNREAD_S)):
        await asyncio.sleep(1.0)
        most = max(most, own_bytes(victim.site.hub.pid) - before)
    for _, writer in unread:
        writer.transport.abort()
    await member.close()
    return bounded(most, f"turned away so far: {await victim.turned_away()}")


def bounded(growth_bytes: int, how: str) -> str:
    """Raises Unnoticed where it is more than strangers may cost the hub."""
    said = f"{growth_bytes / 1e6:.0f} MB more in memory; {how}"
    if growth_bytes > MOST_GROWTH_BYTES:
        raise Unnoticed(said)
    return said


Attack = Callable[[Victim], Awaitable[str]]
ATTACKS: Final[Mapping[str, Attack]] = {
    "sockets that say nothing": silent_sockets,
    "half-sent requests": half_requests,
    "half-sent bodies": half_bodies,
    "dripped requests": dripped_requests,
    "websockets without a proof": half_upgrades,
    "large frames before a proof": frames_before_proof,
    "a node that never reads": never_reads,
    "answers that nobody reads": unread_answers,
}
"""By name."""
