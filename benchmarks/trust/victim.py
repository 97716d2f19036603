"""The hub that is attacked: how it answers meanwhile, how its memory and its logs grow, what it turns away.

A process of its own asks `/healthz` during an attack: a thread of the attacker would measure the attacker's own delay.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import resource
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from benchmarks.harness.site import Site
from benchmarks.harness.stranger import Stranger
from echo_shared.messages.fields import printable
from echo_shared.process_memory import own_bytes

LOOK_S: Final = 0.05
HEALTH_WITHIN_S: Final = 60.0
CLOSED_WITHIN_S: Final = 100.0
"""The hub keeps idle connections for some time. A connection that is open after this time stays open."""
BYSTANDER: Final = ("127.0.0.2", 0)
"""Where `/healthz` is asked from: the attacker's address has limits."""
NICENESS: Final = -10
"""Process priority of the bystander, which stands for a separate machine."""
_TURNED_AWAY: Final = re.compile(r'^echo_turned_away_total\{reason="(\w+)",what="(\w+)"\} (\S+)$', re.MULTILINE)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Unnoticed(Exception):
    """The attack went through, or the hub does not report it."""


@dataclass(slots=True, kw_only=True)
class Health:
    """Slowest `/healthz` answer, memory growth and log growth during one attack."""

    stall_s: float = 0.0
    growth_bytes: int = 0
    log_bytes: int = 0
    is_log_plain: bool = True
    """True if no new log line steers a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A hub, and the process that asks for its health."""

    site: Site
    pipe: Connection
    trust: ssl.SSLContext | None = None
    """Trusted certificates of a hub that speaks TLS itself."""

    @property
    def url(self) -> str:
        return self.site.url

    async def operators(self, path: str) -> str:
        """Read a page with the operator's token."""
        operator = {"Authorization": f"Bearer {self.site.token}"}
        trust = self.trust or True
        async with (
            aiohttp.ClientSession(self.url, headers=operator) as session,
            session.get(path, ssl=trust) as answer,
        ):
            return await answer.text()

    async def turned_away(self) -> dict[str, int]:
        """Read the hub's counters of refused connections, requests and messages."""
        found = _TURNED_AWAY.findall(await self.operators("/metrics"))
        return {f"{what}, {reason}": int(float(count)) for reason, what, count in found}

    async def stranger(self, **changes: Any) -> Stranger:
        """Join with a new key."""
        return await Stranger(self.url).join(**changes)

    async def sockets(self, count: int, first_bytes: bytes) -> list[Streams]:
        """Open up to `count` connections that each send `first_bytes`."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 512)), hard))
        address, opened = urlsplit(self.url), list[Streams]()
        for _ in range(count):
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(first_bytes)
                opened.append((reader, writer))
        return opened

    @contextmanager
    def watched(self) -> Iterator[Health]:
        """Watch the hub during the block."""
        health, logs = Health(), self._logs()
        self.pipe.send(self.site.hub.pid)
        try:
            yield health
        finally:
            self.pipe.send(None)
            health.stall_s, health.growth_bytes = self.pipe.recv()
            for path, content in self._logs().items():
                said = content[len(logs.get(path, b"")) :]
                health.log_bytes += len(said)
                text = said.decode(errors="surrogateescape")
                health.is_log_plain = health.is_log_plain and printable(text) == text

    def _logs(self) -> dict[str, bytes]:
        """Logs of the hub, its scorers, learner and verifier."""
        return {str(path): path.read_bytes() for path in (self.site.log, *(self.site.run.root / "logs").glob("*"))}


async def all_closed(opened: list[Streams], *, within_s: float = CLOSED_WITHIN_S) -> str:
    """Wait until the hub has closed all connections. Raises Unnoticed."""
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


@contextmanager
def attacked(site: Site, *, certificate: str = "") -> Iterator[Victim]:
    """Start the bystander of a hub. `certificate` is a file with the hub's own certificate, if it speaks TLS."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(theirs, site.url, certificate), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield Victim(site=site, pipe=ours, trust=_trust(certificate))
    finally:
        ours.close()
        process.join()


def _trust(certificate: str) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=certificate) if certificate else None


def _watch(pipe: Connection, url: str, certificate: str) -> None:
    """Watch, as the bystander, each process id that comes by the pipe until the next message."""
    with suppress(PermissionError):
        os.nice(NICENESS)
    trust = _trust(certificate)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            pipe.send(_look(pipe, url, trust, pipe.recv()))


def _look(pipe: Connection, url: str, trust: ssl.SSLContext | None, pid: int) -> tuple[float, int]:
    stall_s, growth_bytes, before = 0.0, 0, own_bytes(pid)
    while not pipe.poll(LOOK_S):
        began_at = time.monotonic()
        try:
            _ask(url, trust)
        except (OSError, http.client.HTTPException):
            stall_s = max(stall_s, HEALTH_WITHIN_S)  # No answer counts as the longest delay.
        stall_s = max(stall_s, time.monotonic() - began_at)
        growth_bytes = max(growth_bytes, own_bytes(pid) - before)
    pipe.recv()
    return stall_s, growth_bytes


def _ask(url: str, trust: ssl.SSLContext | None) -> None:
    """Ask for `/healthz` on a new connection."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection: http.client.HTTPConnection = (
        http.client.HTTPConnection(address.hostname, address.port, HEALTH_WITHIN_S, BYSTANDER)
        if trust is None
        else http.client.HTTPSConnection(
            address.hostname, address.port, timeout=HEALTH_WITHIN_S, source_address=BYSTANDER, context=trust
        )
    )
    try:
        connection.request("GET", "/healthz")
        connection.getresponse().read()
    finally:
        connection.close()
