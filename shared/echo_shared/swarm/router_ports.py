"""TCP ports that this machine's router opens on request, by UPnP, NAT-PMP or PCP. libtorrent sends the requests, renews
them and withdraws them at the end; this module keeps the router's answers.

A router's answer does not prove that a port is reachable from outside. Only a connection from outside proves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

UNANSWERED: Final = "opens no ports: it answers neither UPnP nor NAT-PMP"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPort:
    """A port of this machine, and the router's port that leads to it. The two numbers may differ."""

    local: int
    external: int
    protocol: str
    """Name of the protocol by which the router was asked, for people."""


class RouterPorts:
    """TCP ports of this machine that its router has opened, by their number on this machine."""

    def __init__(self, *, unasked: str) -> None:
        """`unasked`: why the router is not asked; empty = the router is asked."""
        self.changed = asyncio.Event()
        """Set when a port is opened or closed."""
        self._unasked = unasked
        self._listening = 0
        self._requests: dict[int, int] = {}
        """libtorrent's number of a request -> port of this machine that the request concerns. libtorrent itself
        requests its listening port; the number of that request becomes known with the router's first answer.
        """
        self._opened: dict[int, OpenedPort] = {}
        self._refusal = ""

    @property
    def is_asked(self) -> bool:
        return not self._unasked

    @property
    def opened(self) -> Mapping[int, OpenedPort]:
        return self._opened

    def external(self, port: int) -> int:
        """Return the router's port that leads to this port of this machine: the same number, unless the router chose
        another.
        """
        return self._opened[port].external if port in self._opened else port

    def listening_at(self, port: int) -> None:
        """Record libtorrent's listening port. libtorrent asks the router to open this port without being told."""
        self._listening = port

    def requested(self, port: int, requests: Iterable[int]) -> None:
        """Record the numbers that libtorrent gave to the requests to open `port`."""
        self._requests |= dict.fromkeys(requests, port)

    def granted(self, request: int, external: int, protocol: str) -> None:
        local = self._requests.setdefault(request, self._listening)
        port = OpenedPort(local=local, external=external, protocol=protocol)
        before = self._opened.get(local)
        # A router that speaks several protocols grants the same port twice.
        if before is None or (before.protocol == protocol and before != port):
            self._opened[local] = port
            self.changed.set()

    def refused(self, request: int, protocol: str, reason: str) -> None:
        self._refusal = f"{protocol}: {reason}"
        before = self._opened.get(self._requests.get(request, 0))
        if before is not None and before.protocol == protocol:
            del self._opened[before.local]
            self.changed.set()

    @property
    def sentence(self) -> str:
        """Text about the router for the node's owner, to follow the words "The router"."""
        if self._unasked:
            return f"is not asked to open ports: {self._unasked}"
        if self._opened:
            ports = ", ".join(
                str(port.local) if port.local == port.external else f"{port.external} for this machine's {port.local}"
                for port in sorted(self._opened.values(), key=lambda port: port.local)
            )
            protocols = " and ".join(sorted({port.protocol for port in self._opened.values()}))
            return f"has opened port {ports} ({protocols})"
        return f"opens no ports ({self._refusal})" if self._refusal else UNANSWERED
