"""Asks the hub how it is while it is attacked, from a process of its own: a thread of the attacker's would measure how
long it waits for the attacker."""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final
from urllib.parse import urlsplit

from echo_shared.process_memory import own_bytes

LOOK_S: Final = 0.05
HEALTH_WITHIN_S: Final = 60.0
ADDRESS: Final = "127.0.0.2"
"""Not the attacker's, which has limits."""
NICENESS: Final = -10
"""Where it may: whoever asks has another machine, on which nobody attacks or trains."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """The worst of a time: seconds that `/healthz` took, growth of the hub's own memory in bytes."""

    stall_s: float = 0.0
    growth_bytes: int = 0


class Bystander:
    """Made by `opened`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self, pid: int) -> None:
        """Looks at the hub, this process, from now on."""
        self._pipe.send(pid)

    def end(self) -> Seen:
        """What was seen since `begin`."""
        self._pipe.send(None)
        seen = self._pipe.recv()
        assert isinstance(seen, Seen)
        return seen


@contextmanager
def opened(url: str, *, authority: str | None) -> Iterator[Bystander]:
    """`authority`: a file with whom to believe about the hub's certificate, where it speaks TLS."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_look_whenever_told, args=(theirs, url, authority), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield Bystander(ours)
    finally:
        ours.close()
        process.join()


def _look_whenever_told(pipe: Connection, url: str, authority: str | None) -> None:
    with suppress(PermissionError):
        os.nice(NICENESS)
    trusted = None if authority is None else ssl.create_default_context(cafile=authority)
    pipe.send(None)
    with suppress(EOFError):
        while True:
            pid = pipe.recv()
            pipe.send(_look(pipe, url, trusted, pid))


def _look(pipe: Connection, url: str, trusted: ssl.SSLContext | None, pid: int) -> Seen:
    """Until something is said."""
    seen, before = Seen(), own_bytes(pid)
    while True:
        began_at = time.monotonic()
        connection = _connection(url, trusted)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            seen.stall_s = max(seen.stall_s, HEALTH_WITHIN_S)  # No answer at all is the worst of all.
        finally:
            connection.close()
        seen.stall_s = max(seen.stall_s, time.monotonic() - began_at)
        seen.growth_bytes = max(seen.growth_bytes, own_bytes(pid) - before)
        if pipe.poll(LOOK_S):
            pipe.recv()
            return seen


def _connection(url: str, trusted: ssl.SSLContext | None) -> http.client.HTTPConnection:
    address, whence = urlsplit(url), (ADDRESS, 0)
    assert address.hostname is not None
    if trusted is None:
        return http.client.HTTPConnection(
            address.hostname, address.port, timeout=HEALTH_WITHIN_S, source_address=whence
        )
    return http.client.HTTPSConnection(
        address.hostname, address.port, timeout=HEALTH_WITHIN_S, source_address=whence, context=trusted
    )
