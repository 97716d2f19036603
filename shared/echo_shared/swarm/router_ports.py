"""TCP ports that this machine's router opens on request, by UPnP, NAT-PMP or PCP. libtorrent asks for them, renews them
and gives them back at the end; this module keeps its answers.

An opened port is a claim of the router. Only a connection from outside shows that others reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

UNANSWERED: Final = "opens no ports: it answers neither UPnP nor NAT-PMP"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPort:
    """A port of this machine, and the router's port that leads to it. The two may differ."""

    local: int
    external: int
    protocol: str
    """Protocol by which the router was asked, in words."""


class RouterPorts:
    """The opened ports, by the number on this machine."""

    def __init__(self, *, unasked: str) -> None:
        """`unasked`: why the router is not asked; empty = it is."""
        self.changed = asyncio.Event()
        """Set at each change."""
        self._unasked = unasked
        self._listening = 0
        self._requests: dict[int, int] = {}
        """Ports of this machine for which the router was asked, by the number that libtorrent gave to the request. The
        request for the listening port is libtorrent's own; its number enters with the first answer.
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
        """Return the port at which other machines reach this port of this machine: itself, unless the router opened
        another one for it.
        """
        return self._opened[port].external if port in self._opened else port

    def listening_at(self, port: int) -> None:
        """Note libtorrent's own port, for which libtorrent asks by itself."""
        self._listening = port

    def requested(self, port: int, requests: Iterable[int]) -> None:
        """Note the numbers of libtorrent's requests for another port."""
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
        """Predicate of a sentence for the node's owner, whose subject is the router."""
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
