"""The hub's listening sockets. They close connections above the rate limits before asyncio creates anything for them:
closing is far cheaper than a transport, a task and a protocol.

The kernel's queue is served in order, so a flood of connections delays every client.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, Final, Protocol

ACCEPTED_AT_ONCE: Final = 32
"""Maximum number of connections accepted per turn of the event loop, so that open connections are served in between."""
TURNED_AWAY_AT_ONCE: Final = 256
WAITING_IN_SYSTEM: Final = 1_024
"""Length of the kernel's accept queue, as far as the system allows. A client that finds it full retries after a second.
"""


class ConnectionRates(Protocol):
    """Limits how often addresses connect. Implemented by `limits.ConnectionLimits`."""

    def admits(self, host: str) -> bool:
        """Return True if the rates allow one more connection from this IP address."""


class ListeningSocket(socket.socket):
    """A socket made by `listen`. The event loop calls `accept` when the socket is readable."""

    def __init__(self, bound: socket.socket, rates: ConnectionRates) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._rates = rates

    def listen(self, _backlog: int = 0) -> None:
        """Listen with the hub's own queue length. asyncio's `_backlog` is ignored: asyncio uses that number both for
        the connections accepted per turn of the loop and for the kernel's queue."""
        super().listen(WAITING_IN_SYSTEM)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept and return the next connection that is within the rates.

        Raises BlockingIOError if no connection waits, or after `TURNED_AWAY_AT_ONCE` refusals, so that the event loop
        can do other work.
        """
        for _ in range(TURNED_AWAY_AT_ONCE):
            connection, address = super().accept()
            if self._rates.admits(str(address[0])):
                return connection, address
            connection.close()
        raise BlockingIOError(errno.EAGAIN, "too many connections were refused in this turn of the loop")


async def listen(host: str, port: int, rates: ConnectionRates, *, shared: bool = False) -> list[ListeningSocket]:
    """Open one socket for each address of `host`; "" stands for all addresses of this machine.

    `shared`: share the port with this user's other processes (SO_REUSEPORT); the system distributes connections among
    them. Raises OSError if a socket cannot be opened.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[ListeningSocket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                bound = socket.create_server(address, family=family, backlog=WAITING_IN_SYSTEM, reuse_port=shared)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
            else:
                opened.append(ListeningSocket(bound, rates))
    except OSError:
        for one in opened:
            one.close()
        raise
    return opened
