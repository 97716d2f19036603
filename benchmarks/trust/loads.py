"""Loads that strangers (clients without an invite) put on a hub: thousands of connections, requests, keys and log
lines.

Each attack returns the hub's reaction, or raises `Unnoticed`. A row has the hub's reaction, its delay in answering
`/healthz` meanwhile, and the growth of its memory and its logs. A separate process (the bystander) requests `/healthz`,
because a thread of the attacker would measure the attacker's own delay. Single messages that break the protocol are
tested in tests/echo_hub/net and tests/end_to_end.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import websockets

from benchmarks.harness.engine import lacks
from benchmarks.harness.pool import apart
from benchmarks.harness.progress import Planned, Progress, most
from benchmarks.harness.site import Settings, Site, merged, open_site
from benchmarks.harness.stranger import Stranger
from echo_hub.config.file import load_config
from echo_hub.core.nodes.strangers import UNPROVEN_SHARE
from echo_shared.process.process_memory import own_bytes
from echo_shared.swarm import read_torrent
from echo_shared.wire.messages import MAX_FRAME_BYTES, LeaseReturned, NodeStatus, ReceiptState
from echo_shared.wire.messages.fields import printable

ENDS_WITHIN_S: Final = 150.0
WARM_UP_STEPS: Final = 20
"""Training steps before the first attack. After these, the hub's memory no longer grows by itself."""
WARM_UP_S: Final = 600.0
MOST_LOG_BYTES: Final = 256 * 1024
"""Maximum bytes by which one attack may make the hub's logs grow, all together."""
NODE_OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
ELSEWHERE: Final = ("nice", "-n", "10")
"""Prefix of the nodes' commands. Nodes usually run on other machines, so here hub, learner and verifier have
priority.
"""
SETTINGS: Final[Settings] = {
    "run": {"name": "trust"},
    "training": {"steps": 100_000},
    "learner": {"checkpoint_every": 50},
    "evaluation": {"problems": 1},
    "leases": {"deadline_s": 10.0},
}
LOOK_S: Final = 0.05
HEALTH_WITHIN_S: Final = 60.0
CLOSED_WITHIN_S: Final = 100.0
"""Seconds within which the hub must close idle connections. A connection that is still open then counts as open
forever.
"""
BYSTANDER: Final = ("127.0.0.2", 0)
"""Address from which `/healthz` is requested. It is not the attacker's, because the hub limits requests per address."""
NICENESS: Final = -10
"""Process priority (niceness) of the process that asks for the hub's health. It stands for another machine, so the load
on this machine must not slow it.
"""
_TURNED_AWAY: Final = re.compile(r'^echo_turned_away_total\{reason="(\w+)",what="(\w+)"\} (\S+)$', re.MULTILINE)
SOCKETS: Final = 1_000
PATIENCE_S: Final = 20.0
UNREADERS: Final = 40
LARGE: Final[Mapping[str, int]] = {
    "/leaderboard": 200,
    "/api/v1/leaderboard?limit=1000000": 200,
    "/api/v1/run": 200,
    "/static/uplot.min.js": 200,
}
MOST_GROWTH_BYTES: Final = 100_000_000
FRESH_KEYS: Final = 2_000
AT_ONCE: Final = 64
STORM_S: Final = 90.0
"""Seconds of the attack by new keys. Keys that have not joined by then are left out."""
COUNT_S: Final = 0.1
HONEST_ADDRESS: Final = "127.0.0.3"
"""Address of the honest node that joins during the attack by new keys."""
HONEST_WITHIN_S: Final = 5.0
STEERING: Final = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2028\x00"
"""Characters that, printed in a terminal, clear it, rename its window and reverse text."""
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

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Figures = dict[str, float]
Attack = Callable[[Site], Awaitable[str | tuple[str, Figures]]]
"""Function that attacks the hub and returns the hub's reaction, with or without figures for the row."""


class Unnoticed(Exception):
    """Error: an attack succeeded, or the hub does not report it."""


class Bystander:
    """Requests a hub's `/healthz`, and watches the hub's memory. It runs in a separate process."""

    def __init__(self, url: str) -> None:
        with suppress(PermissionError):
            os.nice(NICENESS)
        self._address = urlsplit(url)
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def begin(self, pid: int) -> None:
        self._over.clear()
        self._looking = self._thread.submit(self._look, pid)

    def end(self) -> tuple[float, int]:
        """Return the seconds of the slowest answer, and the bytes by which the hub's memory grew."""
        self._over.set()
        return self._looking.result()

    def _look(self, pid: int) -> tuple[float, int]:
        stall_s, growth_bytes, before = 0.0, 0, own_bytes(pid)
        assert self._address.hostname is not None
        while not self._over.wait(LOOK_S):
            began_at = time.monotonic()
            connection = http.client.HTTPConnection(
                self._address.hostname, self._address.port, HEALTH_WITHIN_S, BYSTANDER
            )
            try:
                connection.request("GET", "/healthz")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                stall_s = max(stall_s, HEALTH_WITHIN_S)  # No answer counts as the longest delay.
            finally:
                connection.close()
            stall_s = max(stall_s, time.monotonic() - began_at)
            growth_bytes = max(growth_bytes, own_bytes(pid) - before)
        return stall_s, growth_bytes


async def turned_away(site: Site) -> dict[str, int]:
    """Return the hub's counters of refused connections, requests and messages."""
    operator = {"Authorization": f"Bearer {site.token}"}
    async with aiohttp.ClientSession(site.url, headers=operator) as session, session.get("/metrics") as answer:
        found = _TURNED_AWAY.findall(await answer.text())
    return {f"{what}, {reason}": int(float(count)) for reason, what, count in found}


async def sockets(site: Site, count: int, first_bytes: bytes) -> list[Streams]:
    """Open up to `count` connections, each of which sends `first_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 512)), hard))
    address, opened = urlsplit(site.url), list[Streams]()
    for _ in range(count):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(first_bytes)
            opened.append((reader, writer))
    return opened


async def all_closed(opened: list[Streams]) -> str:
    """Wait until the hub has closed all connections. Raises Unnoticed."""
    began_at = time.monotonic()
    waits = [asyncio.create_task(_until_closed(reader)) for reader, _ in opened]
    _, pending = await asyncio.wait(waits, timeout=CLOSED_WITHIN_S)
    for waiting in pending:
        waiting.cancel()
    for _, writer in opened:
        writer.transport.abort()
    if pending:
        raise Unnoticed(f"{len(pending)} of {len(opened)} are still open after {CLOSED_WITHIN_S:.0f} s")
    return f"all {len(opened)} closed after {time.monotonic() - began_at:.1f} s"


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65_536):
            pass


async def many_sockets(site: Site, *, first_bytes: bytes) -> str:
    return await all_closed(await sockets(site, SOCKETS, first_bytes))


async def frames_before_proof(site: Site) -> str:
    """Send a frame of the largest size on each connection, without a proof of identity."""
    head = b"\x82\xff" + (MAX_FRAME_BYTES - 1).to_bytes(8) + bytes(4)
    opened, payload = await sockets(site, 60, UPGRADE + head), bytes(2**20)

    async def fill(writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for _ in range(8):
                writer.write(payload)
                await writer.drain()

    await asyncio.wait([asyncio.create_task(fill(writer)) for _, writer in opened], timeout=PATIENCE_S)
    return await all_closed(opened)


async def unread_answers(site: Site) -> str:
    """Send requests for pages, lists, scripts and the base model from 200 clients, again and again, and read no
    answer.
    """
    member, seed = await _base_model(site)
    before, most = own_bytes(site.hub.pid), 0
    unread: list[Streams] = []
    for path, answers in {**LARGE, seed: 4}.items():
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode()
        unread += await sockets(site, UNREADERS, request * answers)
    for _, writer in unread:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(int(PATIENCE_S)):
        await asyncio.sleep(1.0)
        most = max(most, own_bytes(site.hub.pid) - before)
    for _, writer in unread:
        writer.transport.abort()
    await member.close()
    how = f"{most / 1e6:.0f} MB more in memory; turned away so far: {await turned_away(site)}"
    if most > MOST_GROWTH_BYTES:
        raise Unnoticed(how)
    return how


async def _base_model(site: Site) -> tuple[Stranger, str]:
    """Join the run as a client. Return the client, and the path of the largest file of the base model on the hub."""
    member = await Stranger(site.url).join()
    assert member.welcome is not None
    base = member.welcome.base
    layout = read_torrent(base.torrent)
    largest, _ = max(layout.files, key=lambda file: file[1])
    return member, f"{base.web_seed_path}{layout.name}/{largest}"


async def log_flood(site: Site) -> str:
    """Make the hub log as much as strangers can, with text that controls a terminal."""
    address, at_once = urlsplit(site.url), asyncio.Semaphore(32)

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
        node = await Stranger(site.url).join(name=STEERING[:40], device=STEERING[:40], backend=STEERING[:40])
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
    name = STEERING.replace("\x00", "").replace("\r", "").encode()
    for number in range(2_000):
        mark = str(number).encode() + name
        yield b"GET /" + mark + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01" + mark + b"\r\n\r\n"
        yield b"GET / HTTP/9.9\r\nX: " + mark + b"\r\n\r\n"
        yield b"GET /node HTTP/1.1\r\nHost: x\r\nAuthorization: Echo " + mark + b"\r\n\r\n"
        yield b"GET /announce/" + mark + b"?info_hash=%1b HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: " + mark + b"\r\n\r\n"


async def fresh_keys(site: Site) -> tuple[str, Figures]:
    """Join with 2,000 new keys that take leases and return nothing. During this, an honest node must be able to
    join.
    """
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
                node = Stranger(site.url)
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
        node = await Stranger(site.url, host=HONEST_ADDRESS).join()
        if node.ended:
            raise Unnoticed(f"an honest node was refused: {node.refused and node.refused.code}")
        joined_s = loop.time() - began_at
        await node.close()
        return joined_s

    joining, counting = asyncio.create_task(honest()), asyncio.create_task(_most_held(site, keys, over))
    await asyncio.gather(*(one() for _ in range(FRESH_KEYS)))
    over.set()
    config = load_config(site.run.config, {}).training
    most_of_all, held = await counting
    quota = max(config.groups_per_step * config.group_size, most_of_all) // UNPROVEN_SHARE
    honest_s = await joining
    how = f"{dict(counts)}, at most {held} rollouts at once where all strangers may have {quota}"
    if held > quota or honest_s > HONEST_WITHIN_S:
        raise Unnoticed(f"{how}; an honest node joined after {honest_s:.1f} s")
    return how, {"held_at_once": held, "honest_joined_s": honest_s}


async def _most_held(site: Site, keys: Collection[str], over: asyncio.Event) -> tuple[int, int]:
    """Count, again and again until `over` is set, the rollouts that nodes hold within their deadlines. Return the
    largest count for all nodes together, and for the nodes with `keys` together.
    """
    query = (
        "WITH out AS (SELECT node_id, leased_at, deadline FROM rollouts WHERE state = ?)"
        " SELECT node_id, count(*) FROM out WHERE deadline > (SELECT max(leased_at) FROM out) GROUP BY node_id"
    )
    most_of_all = most_of_keys = 0
    while not over.is_set():
        held = dict(await asyncio.to_thread(site.rows, query, ReceiptState.LEASED.value))
        most_of_all = max(most_of_all, sum(held.values()))
        most_of_keys = max(most_of_keys, sum(number for node_id, number in held.items() if node_id in keys))
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), COUNT_S)
    return most_of_all, most_of_keys


ATTACKS: Final[Mapping[str, Attack]] = {
    **{f"network, {name}": partial(many_sockets, first_bytes=first) for name, first in FIRST_BYTES.items()},
    "network, large frames before a proof": frames_before_proof,
    "network, answers that nobody reads": unread_answers,
    "protocol, fresh keys": fresh_keys,
    "pages, log flooding": log_flood,
}


def plan() -> list[Planned]:
    return [Planned(name=name, seconds=15, lacks=lacks("llama_cpp", "f32")) for name in ATTACKS]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """Measure the wanted attacks, one row for each. All attack the same hub, which keeps the effects of earlier
    attacks.
    """
    rows: list[dict[str, Any]] = []
    wanted = {name: attack for name, attack in ATTACKS.items() if progress.wants(name)}
    if not wanted:
        return rows
    settings = merged(SETTINGS, {"run": {"seed": seed}})
    with open_site(scratch / "attacked", settings, verbose=True) as site, apart(Bystander, site.url) as bystander:
        site.node(NODE_OPTIONS, within=ELSEWHERE)
        site.wait_for_step(WARM_UP_STEPS, within_s=WARM_UP_S)
        for name, attack in wanted.items():
            rows.append({"case": name, **_attacked(site, bystander, attack)})
            progress.done(name, {"detected": rows[-1]["detected"], "how": rows[-1]["how"]})
    return rows


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst value over all attacks of the delay and of each growth; None if no attack was measured."""
    return {f"{name}_worst": most(rows, name) for name in ("stall_s", "rss_growth_mb", "log_kb")}


def verdict(site: Site, attack: Attack, within_s: float = ENDS_WITHIN_S) -> dict[str, Any]:
    """Carry out an attack. `detected` is False for a successful or unfinished attack."""

    async def limited() -> str | tuple[str, dict[str, float]]:
        async with asyncio.timeout(within_s):
            return await attack(site)

    try:
        found = asyncio.run(limited())
    except Unnoticed as error:
        return {"detected": False, "how": str(error)}
    except TimeoutError:
        return {"detected": False, "how": f"nothing for {within_s:.0f} s"}
    how, figures = (found, {}) if isinstance(found, str) else found
    return {"detected": True, "how": how, **figures}


def _attacked(site: Site, bystander: Bystander, attack: Attack) -> dict[str, Any]:
    """Carry out an attack while measuring the hub. `detected` is False also if the attack fills the log, or writes
    control characters to it.
    """
    logs, began_at = _logs(site), time.monotonic()
    bystander.begin(site.hub.pid)
    row = verdict(site, attack)
    stall_s, growth_bytes = bystander.end()
    said = b"".join(content[len(logs.get(path, b"")) :] for path, content in _logs(site).items())
    text = said.decode(errors="surrogateescape")
    if len(said) > MOST_LOG_BYTES or printable(text) != text:
        plain = "plain" if printable(text) == text else "not plain"
        row |= {"detected": False, "how": f"the log is {plain}, {len(said)} bytes more; {row['how']}"}
    return {
        **row,
        "stall_s": stall_s,
        "rss_growth_mb": growth_bytes / 1e6,
        "log_kb": len(said) / 1e3,
        "seconds": time.monotonic() - began_at,
    }


def _logs(site: Site) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (site.log, *(site.run.root / "logs").glob("*"))}
