"""Loads that strangers put on a hub: connections, requests, handshakes, logins, keys and log lines by the thousand.

Each attack returns what the hub did, or raises `Unnoticed`. `attacking` measures the hub's answers, memory and logs
around it. Single messages that break the protocol are tests (tests/echo_hub/net, tests/end_to_end).
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgpack
import websockets
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.harness.stranger import Stranger
from benchmarks.trust.victim import Streams, Unnoticed, Victim, all_closed
from echo_hub.config.file import load_config
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_hub.dashboard.access.credentials import set_password
from echo_shared.messages import MAX_FRAME_BYTES, LeaseReturned, NodeStatus, ReceiptState
from echo_shared.process_memory import own_bytes
from echo_shared.swarm import read_torrent

SOCKETS: Final = 1_000
PATIENCE_S: Final = 20.0
FLOOD_S: Final = 10.0
UNREADERS: Final = 40
"""Clients of each path that read nothing."""
LARGE: Final[Mapping[str, int]] = {
    "/leaderboard": 200,
    "/api/v1/leaderboard?limit=1000000": 200,
    "/api/v1/run": 200,
    "/static/uplot.min.js": 200,
}
"""Paths with large public answers, and requests per client."""
MOST_GROWTH_BYTES: Final = 100_000_000
BOMB_ITEMS: Final = 8_000_000
BOMB_BYTES: Final = 2**30
FRESH_KEYS: Final = 2_000
AT_ONCE: Final = 64
STORM_S: Final = 90.0
"""Keys that have not been tried by then are left out."""
COUNT_S: Final = 0.1
ELSEWHERE: Final = "127.0.0.3"
"""Address of the honest node that joins during the storm."""
HONEST_WITHIN_S: Final = 5.0
PASSWORD: Final = "the operator's own"
GUESSERS: Final = 400
READERS: Final = 400
STEERING: Final = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2028\x00"
"""Clears a terminal, renames its window, and reverses text."""
HANDSHAKE_WITHIN_S: Final = 60.0
UPGRADE: Final = (
    b"GET /node HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FIRST_BYTES: Final[Mapping[str, bytes]] = {
    "sockets that say nothing": b"",
    "half-sent requests": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half-sent bodies": b"POST /api/v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc",
    "websockets without a proof": UPGRADE,
}

Figures = dict[str, float]
Attack = Callable[[Victim], Awaitable[str | tuple[str, Figures]]]
"""Returns the hub's reaction, and optional figures for the row."""


def _from(number: int) -> tuple[str, int]:
    """Return one of many local addresses."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}", 0


def _client(url: str, number: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(local_addr=_from(number)))


async def many_sockets(victim: Victim, *, first_bytes: bytes) -> str:
    """Open 1,000 connections that send these bytes and no more."""
    return await all_closed(await victim.sockets(SOCKETS, first_bytes))


async def frames_before_proof(victim: Victim) -> str:
    """Send a frame of the largest size on each connection, without a proof of identity."""
    head = b"\x82\xff" + (MAX_FRAME_BYTES - 1).to_bytes(8) + bytes(4)
    opened, payload = await victim.sockets(60, UPGRADE + head), bytes(2**20)

    async def fill(writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for _ in range(8):
                writer.write(payload)
                await writer.drain()

    await asyncio.wait([asyncio.create_task(fill(writer)) for _, writer in opened], timeout=PATIENCE_S)
    return await all_closed(opened)


async def unread_answers(victim: Victim) -> str:
    """Ask for pages, lists, scripts and the base model with 200 clients, again and again, and read nothing."""
    member, seed = await _base_model(victim)
    before, most = own_bytes(victim.site.hub.pid), 0
    unread: list[Streams] = []
    for path, answers in {**LARGE, seed: 4}.items():
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode()
        unread += await victim.sockets(UNREADERS, request * answers)
    for _, writer in unread:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(int(PATIENCE_S)):
        await asyncio.sleep(1.0)
        most = max(most, own_bytes(victim.site.hub.pid) - before)
    for _, writer in unread:
        writer.transport.abort()
    await member.close()
    how = f"{most / 1e6:.0f} MB more in memory; turned away so far: {await victim.turned_away()}"
    if most > MOST_GROWTH_BYTES:
        raise Unnoticed(how)
    return how


async def _base_model(victim: Victim) -> tuple[Stranger, str]:
    """Join; return the member, and the path of the largest file of the base model for this member."""
    member = await victim.stranger()
    assert member.welcome is not None
    base = member.welcome.base
    layout = read_torrent(base.torrent)
    largest, _ = max(layout.files, key=lambda file: file[1])
    return member, f"{base.web_seed_path}{layout.name}/{largest}"


async def bombs(victim: Victim) -> str:
    """Send a valid status with 8 million empty lists in it."""
    node = await victim.stranger()
    status = NodeStatus(activity="waiting", capacity=0, policy_version=0, tokens_per_s=0)
    packed = msgpack.packb({**msgpack.unpackb(node.session.send(status)), "x": 0})
    frame = packed[:-1] + b"\xdd" + BOMB_ITEMS.to_bytes(4) + b"\x90" * BOMB_ITEMS
    with suppress(websockets.ConnectionClosed):
        for _ in range(10):
            await node.socket.send(frame)
    try:
        await node.until(lambda: node.ended, within_s=PATIENCE_S)
    except TimeoutError as error:
        raise Unnoticed("the connection goes on") from error
    finally:
        await node.close()
    return f"disconnected: {node.refused.code if node.refused else 'closed'}"


async def bombs_in_bodies(victim: Victim) -> str:
    """Send bodies that unpack to a thousand times their size to every kind of route."""
    address, heads = urlsplit(victim.url), Counter[str]()
    for kind in ("gzip", "deflate"):
        whole = _bomb(kind)
        for target in ("POST /login", "GET /healthz", "GET /announce/x", "POST /actions/pause", "GET /node", "PUT /x"):
            for body in (whole[:8_000], whole):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                head = (
                    f"{target} HTTP/1.1\r\nHost: {address.netloc}\r\nOrigin: {victim.url}\r\n"
                    f"Content-Encoding: {kind}\r\n"
                    f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        writer.write(head.encode() + body)
                        heads[(await reader.readline()).decode()[9:12] or "closed"] += 1
                writer.transport.abort()
    return f"answers {dict(heads)}"


def _bomb(kind: str) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if kind == "gzip" else 15)
    zeros = bytes(2**20)
    return b"".join([*(packer.compress(zeros) for _ in range(BOMB_BYTES // len(zeros))), packer.flush()])


async def logins(victim: Victim) -> str:
    """Guess passwords from 400 addresses without pause. The operator's token and password must work meanwhile."""
    site, answers, over = victim.site, Counter[int](), asyncio.Event()
    set_password(site.run.operator_password, PASSWORD)

    async def attempt(http: aiohttp.ClientSession, secret: str) -> int:
        form, origin = {"secret": secret}, {"Origin": site.url}
        async with http.post("/login", data=form, headers=origin, allow_redirects=False) as answer:
            return answer.status

    async def guess(number: int) -> None:
        async with _client(site.url, number) as http:
            while not over.is_set():
                with suppress(aiohttp.ClientError):
                    answers[await attempt(http, f"not it, {number}")] += 1
                await asyncio.sleep(0.2)

    async def operator(number: int, secret: str) -> int:
        """Return the attempt that lets the operator in; 0 if none does."""
        async with _client(site.url, number) as http:
            for tried in range(1, 31):
                with suppress(aiohttp.ClientError):
                    if await attempt(http, secret) == 303:
                        return tried
                await asyncio.sleep(1.0)
        return 0

    guessing = [asyncio.create_task(guess(number)) for number in range(GUESSERS)]
    try:
        await asyncio.sleep(FLOOD_S / 2)
        token = await operator(GUESSERS + 1, site.token)
        password = await operator(GUESSERS + 2, PASSWORD)
    finally:
        over.set()
        await asyncio.gather(*guessing, return_exceptions=True)
        site.run.operator_password.unlink()
    if not token or not password or answers[303]:
        raise Unnoticed(f"in by token: {token}, by password: {password}; answers {dict(answers)}")
    return f"answers {dict(answers)}; in by token at attempt {token}, by password at {password}"


async def slow_readers(victim: Victim) -> str:
    """Read pages and files a few bytes at a time with 400 clients. Others must be served meanwhile."""
    address = urlsplit(victim.url)
    member, seed = await _base_model(victim)
    paths = ("/leaderboard", "/static/echo.css", seed)
    requests = b"".join(
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode() * 4 for path in paths
    )
    opened: list[socket.socket] = []
    for number in range(READERS):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        slow.bind(_from(number % 40))
        with suppress(OSError):
            slow.connect((address.hostname, address.port))
            slow.send(requests)
            slow.setblocking(False)
        opened.append(slow)
    served, until = 0, time.monotonic() + FLOOD_S
    async with _client(victim.url, 999) as http:
        while time.monotonic() < until:
            for slow in opened:
                with suppress(OSError):
                    slow.recv(16)
            async with http.get("/leaderboard") as answer:
                served += answer.status == 200
            other = await victim.stranger()
            served += other.welcome is not None
            await other.close()
    for slow in opened:
        slow.close()
    await member.close()
    if not served:
        raise Unnoticed("no other client is served")
    return f"{READERS} read slowly, {served} others were served; turned away so far: {await victim.turned_away()}"


async def log_flood(victim: Victim) -> str:
    """Make the hub log as much as strangers can, with text that steers a terminal."""
    address, at_once = urlsplit(victim.url), asyncio.Semaphore(32)

    async def send(request: bytes) -> None:
        async with at_once:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(request)
                await writer.drain()
                writer.transport.abort()

    await asyncio.gather(*(send(request) for request in _rubbish()))
    num_joined = 0
    for _ in range(100):
        node = await victim.stranger(name=STEERING[:40], device=STEERING[:40], backend=STEERING[:40])
        num_joined += node.welcome is not None
        if node.welcome is not None:
            with suppress(websockets.ConnectionClosed):
                status = NodeStatus(activity="waiting", capacity=0, policy_version=0, tokens_per_s=0)
                await node.say_raw(status, precision=STEERING * 4)
                for lease_id in range(20):
                    await node.say(LeaseReturned(lease_id=lease_id, indices=(0,), reason=STEERING))
                await node.say_raw(status, activity=STEERING)
        await node.close()
    return f"12,000 requests, {num_joined} nodes"


def _rubbish() -> Iterator[bytes]:
    """Requests that could each make a log line."""
    name = STEERING.replace("\x00", "").replace("\r", "").encode()
    for number in range(2_000):
        mark = str(number).encode() + name
        yield b"GET /" + mark + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01" + mark + b"\r\n\r\n"
        yield b"GET / HTTP/9.9\r\nX: " + mark + b"\r\n\r\n"
        yield b"GET /node HTTP/1.1\r\nHost: x\r\nAuthorization: Echo " + mark + b"\r\n\r\n"
        yield b"GET /announce/" + mark + b"?info_hash=%1b HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: " + mark + b"\r\n\r\n"


async def fresh_keys(victim: Victim) -> tuple[str, Figures]:
    """Join with 2,000 new keys that take leases and return nothing. An honest node must be able to join meanwhile."""
    loop = asyncio.get_running_loop()
    keys, counts = set[str](), Counter(joined=0, leased=0)
    limit, under_way, over = asyncio.Semaphore(AT_ONCE), asyncio.Event(), asyncio.Event()
    until = loop.time() + STORM_S

    async def one() -> None:
        async with limit:
            if loop.time() > until:
                counts["not tried"] += 1
                return
            try:
                node = Stranger(victim.url)
                keys.add(node.me.node_id)
                await node.join()
                counts["joined" if not node.ended else "turned away"] += 1
                if not node.ended:
                    await node.report(4096)
                    await node.heard()
                counts["leased"] += node.num_leased
                await node.close()
            except (OSError, websockets.WebSocketException):
                counts["not answered"] += 1
            if counts.total() > 2 * AT_ONCE:
                under_way.set()

    async def honest() -> float:
        await under_way.wait()
        began_at = loop.time()
        node = await Stranger(victim.url, host=ELSEWHERE).join()
        if node.ended:
            raise Unnoticed(f"an honest node was refused: {node.refused and node.refused.code}")
        joined_s = loop.time() - began_at
        await node.close()
        return joined_s

    joining, counting = asyncio.create_task(honest()), asyncio.create_task(_most_held(victim, keys, over))
    await asyncio.gather(*(one() for _ in range(FRESH_KEYS)))
    over.set()
    config = load_config(victim.site.run.config, {}).training
    most_of_all, held = await counting
    quota = max(config.groups_per_step * config.group_size, most_of_all) // UNPROVEN_SHARE
    honest_s = await joining
    how = f"{dict(counts)}, at most {held} rollouts at once where all strangers may have {quota}"
    if held > quota or honest_s > HONEST_WITHIN_S:
        raise Unnoticed(f"{how}; an honest node joined after {honest_s:.1f} s")
    return how, {"held_at_once": held, "honest_joined_s": honest_s}


async def _most_held(victim: Victim, keys: Collection[str], over: asyncio.Event) -> tuple[int, int]:
    """Sample held rollouts within their deadlines; return the maximum over all nodes, and the maximum over `keys`."""
    query = (
        "WITH out AS (SELECT node_id, leased_at, deadline FROM rollouts WHERE state = ?)"
        " SELECT node_id, count(*) FROM out WHERE deadline > (SELECT max(leased_at) FROM out) GROUP BY node_id"
    )
    most_of_all = most_of_keys = 0
    while not over.is_set():
        held = dict(await asyncio.to_thread(victim.site.rows, query, ReceiptState.LEASED.value))
        most_of_all = max(most_of_all, sum(held.values()))
        most_of_keys = max(most_of_keys, sum(number for node_id, number in held.items() if node_id in keys))
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), COUNT_S)
    return most_of_all, most_of_keys


async def handshakes(victim: Victim, *, share: float) -> str:
    """Begin 1,000 TLS handshakes with this share of the first message, and send no more."""
    before, hello = await victim.turned_away(), client_hello()
    opened = await victim.sockets(SOCKETS, hello[: int(share * len(hello))])
    closed = await all_closed(opened, within_s=HANDSHAKE_WITHIN_S)
    more = Counter(await victim.turned_away()) - Counter(before)
    if not more:
        raise Unnoticed(f"{closed}; the hub counts none of it")
    return f"{closed}; the hub counts {dict(more)}"


def client_hello() -> bytes:
    """Return the first message of a TLS handshake. The server answers it with its own expensive part."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def tls_settings(directory: Path) -> dict[str, Any]:
    """Settings of a server with a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "attacked")])
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    unsigned = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = unsigned.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    made = dated.add_extension(place, critical=False).sign(key, hashes.SHA256())
    certificate, secret = directory / "attacked.pem", directory / "attacked.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return {"tls_certificate": str(certificate), "tls_key": str(secret)}


ON_HUB: Final[Mapping[str, Attack]] = {
    **{f"network, {name}": partial(many_sockets, first_bytes=first) for name, first in FIRST_BYTES.items()},
    "network, large frames before a proof": frames_before_proof,
    "network, answers that nobody reads": unread_answers,
    "protocol, bombs": bombs,
    "protocol, fresh keys": fresh_keys,
    "pages, login flood": logins,
    "pages, compressed bombs in bodies": bombs_in_bodies,
    "pages, slow readers": slow_readers,
    "pages, log flooding": log_flood,
}
ON_TLS_HUB: Final[Mapping[str, Attack]] = {
    "TLS, connections without a handshake": partial(handshakes, share=0.0),
    "TLS, half a first message": partial(handshakes, share=0.5),
    "TLS, half-done handshakes": partial(handshakes, share=1.0),
}
