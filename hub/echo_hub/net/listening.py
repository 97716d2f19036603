"""The hub's listening sockets: a connection that is over the rates is closed before anything is made of it.

Who waits in the system's queue waits for all before him, and a transport, a task and a protocol for each of a flood's
cost far more than to close it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, Final

ACCEPTED_AT_ONCE: Final = 32
"""Connections in one turn of the event loop, so that those that are open get theirs."""
TURNED_AWAY_AT_ONCE: Final = 256
WAITING_IN_SYSTEM: Final = 1_024
"""Connections that the system keeps for the hub, as far as it may: who finds no room tries again after a second."""

Admits = Callable[[str], bool]
"""Whether one more connection from this address, an IP as text, is within the rates."""


class Listening(socket.socket):
    """Made by `listen`, for an event loop that accepts on it when it can be read."""

    def __init__(self, bound: socket.socket, admits: Admits) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._admits = admits

    def listen(self, _backlog: int = 0) -> None:
        """The event loop has one figure for what it accepts at once and for what waits."""
        super().listen(WAITING_IN_SYSTEM)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next one within the rates. Raises BlockingIOError where none waits, or others are to have their turn."""
        for _ in range(TURNED_AWAY_AT_ONCE):
            connection, address = super().accept()
            if self._admits(str(address[0])):
                return connection, address
            connection.close()
        raise BlockingIOError(errno.EAGAIN, "so many were turned away that others get their turn")


async def listen(host: str, port: int, admits: Admits, *, shared: bool = False) -> list[Listening]:
    """One socket for each address of the host; "" = all of this machine. `shared`: with other processes of this user's,
    among which the system divides what comes (SO_REUSEPORT). Raises OSError where one cannot be had."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[Listening] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                bound = socket.create_server(address, family=family, backlog=WAITING_IN_SYSTEM, reuse_port=shared)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
            else:
                opened.append(Listening(bound, admits))
    except OSError:
        for one in opened:
            one.close()
        raise
    return opened
