"""Attacks on what the hub's port offers beside the protocol: pages, logins, lists, files, and the log that they fill.

Each says what the hub did, or raises `Unnoticed`. As with `network`, its delay and memory are measured around them.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import websockets

from benchmarks.trust.protocol import Unnoticed, Victim
from benchmarks.trust.stranger import Stranger
from echo_hub.dashboard.access.credentials import set_password
from echo_shared.messages import LeaseReturned, NodeStatus, ReceiptsWanted
from echo_shared.swarm import read_torrent

PASSWORD: Final = "the operator's own"
GUESSERS: Final = 400
FLOOD_S: Final = 10.0
KEYS: Final = 100_000
"""Nodes in the books: what fresh keys leave behind in months."""
READERS: Final = 400
BOMB_BYTES: Final = 2**30
"""What a body of a megabyte unpacks to."""
STEERING: Final = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2028\x00"
"""What clears a terminal, names its window, and turns text around."""


def _from(number: int) -> tuple[str, int]:
    """One of many addresses of this machine."""
    return f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}", 0


async def logins(victim: Victim) -> str:
    """Passwords are tried from hundreds of addresses without pause; token and password open the door all the while."""
    site = victim.site
    set_password(site.run.operator_password, PASSWORD)
    answers: Counter[int] = Counter()
    over = asyncio.Event()

    async def attempt(http: aiohttp.ClientSession, secret: str) -> int:
        form, origin = {"secret": secret}, {"Origin": site.url}
        async with http.post("/login", data=form, headers=origin, allow_redirects=False) as answer:
            return answer.status

    async def guess(number: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=_from(number))
        async with aiohttp.ClientSession(site.url, connector=connector) as http:
            while not over.is_set():
                with suppress(aiohttp.ClientError):
                    answers[await attempt(http, f"not it, {number}")] += 1
                await asyncio.sleep(0.2)

    async def operator(number: int, secret: str) -> int:
        """Attempts until it is in."""
        connector = aiohttp.TCPConnector(local_addr=_from(number))
        async with aiohttp.ClientSession(site.url, connector=connector) as http:
            for tried in range(1, 31):
                with suppress(aiohttp.ClientError):
                    if await attempt(http, secret) == 303:
                        return tried
                await asyncio.sleep(1.0)
        return 0

    guessing = [asyncio.create_task(guess(number)) for number in range(GUESSERS)]
    try:
        await asyncio.sleep(FLOOD_S / 2)
        token = await operator(GUESSERS + 1, site.run.operator_token.read_text().strip())
        password = await operator(GUESSERS + 2, PASSWORD)
    finally:
        over.set()
        await asyncio.gather(*guessing, return_exceptions=True)
        site.run.operator_password.unlink()
    if not token or not password or answers[303]:
        raise Unnoticed(f"in by token: {token}, by password: {password}; answers {dict(answers)}")
    turned = f"{answers[429]} told to wait, {answers[503]} that it is busy, {answers[403]} that it is wrong"
    return f"{turned}; in by token at attempt {token}, by password at {password}"


async def million_rows(victim: Victim) -> str:
    """The lists are asked for as long as they get, again and again, while the books hold 100,000 nodes."""
    with closing(sqlite3.connect(victim.site.run.root / "echo.db", timeout=30.0)) as books, books:
        books.executemany(
            "INSERT INTO nodes (node_id, public_key, name, backend, device, first_seen, last_seen)"
            " VALUES (?, ?, 'stranger', 'llama_cpp', 'cpu', 0, 0)",
            ((f"{number:020x}", f"{number:064x}") for number in range(KEYS)),
        )
        books.executemany("INSERT INTO tallies VALUES (?, 'trained', 1, 1, 4)", ((f"{n:020x}",) for n in range(KEYS)))
        books.execute("UPDATE outcome_tallies SET rollouts = rollouts + ? WHERE outcome = 'trained'", (KEYS,))
    asked = ("/api/v1/leaderboard", "/leaderboard?sort=-name", "/api/v1/leaderboard?limit=1000000&offset=-1", "/readyz")
    sizes: Counter[str] = Counter()
    until = time.monotonic() + FLOOD_S

    async def ask(number: int) -> None:
        connector = aiohttp.TCPConnector(local_addr=_from(number))
        async with aiohttp.ClientSession(victim.url, connector=connector) as http:
            while time.monotonic() < until:
                for path in asked:
                    async with http.get(path) as answer:
                        sizes[path] = max(sizes[path], len(await answer.read()))

    try:
        await asyncio.gather(*(ask(number) for number in range(8)))
    finally:
        with closing(sqlite3.connect(victim.site.run.root / "echo.db", timeout=30.0)) as books, books:
            books.execute("DELETE FROM nodes WHERE public_key LIKE '000000000%'")
            books.execute("DELETE FROM tallies WHERE node_id LIKE '000000000%'")
    largest = max(sizes.values())
    if largest > 2**20:
        raise Unnoticed(f"an answer of {largest / 1e6:.1f} MB")
    return f"{largest / 1e3:.0f} KB at most, of {KEYS} nodes"


def _bomb(kind: str) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if kind == "gzip" else 15)
    zeros = bytes(2**20)
    return b"".join([*(packer.compress(zeros) for _ in range(BOMB_BYTES // len(zeros))), packer.flush()])


async def bombs_in_bodies(victim: Victim) -> str:
    """Bodies that unpack to a thousand times their size, to every kind of route, small enough for a form and larger."""
    address = urlsplit(victim.url)
    heads: Counter[str] = Counter()
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
                    async with asyncio.timeout(20.0):
                        writer.write(head.encode() + body)
                        heads[(await reader.readline()).decode()[9:12] or "closed"] += 1
                writer.transport.abort()
    return f"answers {dict(heads)}"


async def compressed_frames(victim: Victim) -> str:
    """Frames said to be compressed, which nobody has agreed on."""
    node = await victim.stranger()
    payload = zlib.compress(bytes(2**24), 9)[2:-4]
    frame = b"\xc2\xff" + len(payload).to_bytes(8) + bytes(4) + payload  # FIN, RSV1; masked with zeros.
    with suppress(websockets.ConnectionClosed, OSError):
        node.socket.transport.write(frame)
    try:
        await node.until(lambda: node.ended, within_s=20.0)
    except TimeoutError as error:
        raise Unnoticed("the connection goes on") from error
    finally:
        await node.close()
    return "disconnected"


async def slow_readers(victim: Victim) -> str:
    """Pages and files are asked for and read a few bytes at a time; others are served meanwhile."""
    address = urlsplit(victim.url)
    member = await victim.stranger()
    assert member.welcome is not None
    layout = read_torrent(member.welcome.base.torrent)
    largest, _ = max(layout.files, key=lambda file: file[1])
    paths = ("/leaderboard", "/static/echo.css", f"{member.welcome.base.web_seed_path}{layout.name}/{largest}")
    opened: list[socket.socket] = []
    for number in range(READERS):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        slow.bind(_from(number % 40))
        with suppress(OSError):
            slow.connect((address.hostname, address.port))
            for path in paths:
                slow.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode() * 4)
            slow.setblocking(False)
        opened.append(slow)
    served, until = 0, time.monotonic() + FLOOD_S
    async with aiohttp.ClientSession(victim.url, connector=aiohttp.TCPConnector(local_addr=_from(999))) as http:
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
        raise Unnoticed("nobody else is served")
    return f"{READERS} read slowly, {served} others were served; turned away so far: {await victim.turned_away()}"


def _rubbish() -> Iterator[bytes]:
    """Requests of which each would be a line in a log that tells all."""
    name = STEERING.replace("\x00", "").replace("\r", "").encode()
    for number in range(2_000):
        mark = str(number).encode() + name
        yield b"GET /" + mark + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01" + mark + b"\r\n\r\n"
        yield b"GET / HTTP/9.9\r\nX: " + mark + b"\r\n\r\n"
        yield b"GET /node HTTP/1.1\r\nHost: x\r\nAuthorization: Echo " + mark + b"\r\n\r\n"
        yield b"GET /announce/" + mark + b"?info_hash=%1b HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: " + mark + b"\r\n\r\n"


async def log_flood(victim: Victim) -> str:
    """All that anybody can have the hub say of it, thousands of times, with what steers a terminal in it. How much the
    logs have grown by, and whether they are plain text, is looked at behind every attack."""
    address = urlsplit(victim.url)
    at_once = asyncio.Semaphore(32)

    async def send(request: bytes) -> None:
        async with at_once:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(request)
                await writer.drain()
                writer.transport.abort()

    await asyncio.gather(*(send(request) for request in _rubbish()))
    num_joined = 0
    for number in range(100):
        node = await Stranger(victim.url).join(name=STEERING[:40], device=STEERING[:40], backend=STEERING[:40])
        num_joined += node.welcome is not None
        if node.welcome is not None:
            with suppress(websockets.ConnectionClosed):
                status = NodeStatus(activity="waiting", capacity=0, policy_version=0, tokens_per_s=0)
                await node.say_raw(status, precision=STEERING * 4)
                for lease_id in range(20):
                    await node.say(LeaseReturned(lease_id=lease_id, indices=(0,), reason=STEERING))
                await node.say(ReceiptsWanted(rollout_ids=(f"{number}-0",)))
                await node.say_raw(status, activity=STEERING)
        await node.close()
    return f"12,000 requests, {num_joined} nodes"


Attack = Callable[[Victim], Awaitable[str]]
ATTACKS: Final[Mapping[str, Attack]] = {
    "login flood": logins,
    "lists of 100,000 nodes": million_rows,
    "compressed bombs in bodies": bombs_in_bodies,
    "compressed frames": compressed_frames,
    "slow readers": slow_readers,
    "log flooding": log_flood,
}
"""By name."""
