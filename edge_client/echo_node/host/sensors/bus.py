"""D-Bus, which reports the user's activity on Linux desktops. Each call has a deadline; after a failure no calls are
made for a while.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from jeepney.io.blocking import DBusConnection

log = logging.getLogger(__name__)

ANSWER_S: Final = 0.5
AGAIN_S: Final = 30.0
"""Seconds after a failure during which no call is made."""


class Bus:
    """Connection to D-Bus. The first call opens it."""

    def __init__(self, kind: Literal["SESSION", "SYSTEM"], *, takes_files: bool = False) -> None:
        """`takes_files`: True if answers may contain file descriptors."""
        self._kind = kind
        self._takes_files = takes_files
        self._connection: DBusConnection | None = None
        self._not_before = 0.0

    def call(
        self,
        service: str,
        path: str,
        interface: str,
        method: str,
        signature: str = "",
        body: tuple[Any, ...] = (),
        *,
        may_start: bool = False,
    ) -> tuple[Any, ...] | None:
        """Return the answer; None without a bus, a service, or an answer in time.

        `may_start`: True allows the bus to start the service.
        """
        import jeepney

        connection = self._connected()
        if connection is None:
            return None
        address = jeepney.DBusAddress(path, service, interface)
        message = jeepney.new_method_call(address, method, signature or None, body)
        if not may_start:
            message.header.flags |= (
                jeepney.MessageFlag.no_auto_start
            )  # The call must not start a service of the desktop.
        try:
            reply = connection.send_and_get_reply(message, timeout=ANSWER_S)
        except (OSError, EOFError, ValueError) as error:  # A TimeoutError is an OSError, so it is caught here too.
            log.debug("D-Bus (%s) does not answer: %s", self._kind, error)
            self.close()
            return None
        answered: tuple[Any, ...] = reply.body
        return answered if reply.header.message_type is jeepney.MessageType.method_return else None

    def get(self, service: str, path: str, interface: str, name: str) -> Any:
        """Return a property of an object on the bus; None without a bus, a service, or an answer in time."""
        answer = self.call(service, path, "org.freedesktop.DBus.Properties", "Get", "ss", (interface, name))
        return None if answer is None else answer[0][1]

    def close(self) -> None:
        """Close the connection. Later calls open it again, AGAIN_S seconds from now at the earliest."""
        self._not_before = time.monotonic() + AGAIN_S
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> DBusConnection | None:
        from jeepney.io.blocking import open_dbus_connection
        from jeepney.wrappers import DBusErrorResponse

        if self._connection is None and time.monotonic() >= self._not_before:
            try:
                self._connection = open_dbus_connection(bus=self._kind, enable_fds=self._takes_files)
            except (OSError, EOFError, KeyError, ValueError, RuntimeError, DBusErrorResponse) as error:
                log.debug("There is no D-Bus (%s): %s", self._kind, error)
                self.close()
        return self._connection
