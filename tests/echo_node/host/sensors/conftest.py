"""A private D-Bus with scripted desktop services."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

Answers = dict[tuple[str, str], tuple[str, tuple[Any, ...]]]
"""(path, method) of a call -> signature and body of the reply. Any other call gets an error."""


class Desktop:
    """Desktop services on one bus; a test may change `answers` at any time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: Answers = {}
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[tuple[Any, ...]] = []
        self.senders: list[str] = []
        """Names of the bus connections that have sent calls, one name per call."""
        self._connections: list[Any] = []
        self._services: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def serve(self, name: str) -> None:
        from jeepney.bus_messages import message_bus
        from jeepney.io.blocking import open_dbus_connection

        connection = open_dbus_connection(bus=self.address, enable_fds=True)
        connection.send_and_get_reply(message_bus.RequestName(name))
        thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
        thread.start()
        self._connections.append(connection)
        self._services[name] = connection
        self._threads.append(thread)

    def _answer(self, connection: Any) -> None:
        from jeepney import HeaderFields, MessageType, new_error, new_method_return

        with suppress(OSError, EOFError, ValueError):
            while True:
                message = connection.receive()
                if message.header.message_type is not MessageType.method_call:
                    continue
                fields = message.header.fields
                key = fields[HeaderFields.path], fields[HeaderFields.member]
                if key[1] in ("Get", "GetAll"):
                    key = key[0], "/".join([key[1], *message.body[1:]]).rstrip("/")
                self.asked.append(key)
                self.bodies.append(message.body)
                self.senders.append(fields[HeaderFields.sender])
                if key in self.answers:
                    signature, body = self.answers[key]
                    connection.send(new_method_return(message, signature, body))
                else:
                    connection.send(new_error(message, "org.freedesktop.DBus.Error.UnknownMethod"))

    def stop(self, name: str) -> None:
        """End a service, as at a logout."""
        self._services[name].sock.shutdown(2)
        while self.is_connected(name):
            time.sleep(0.001)

    def is_connected(self, name: str) -> bool:
        """Return True if the connection with this name is open."""
        from jeepney.bus_messages import message_bus
        from jeepney.io.blocking import open_dbus_connection

        with open_dbus_connection(bus=self.address) as bus:
            return bool(bus.send_and_get_reply(message_bus.NameHasOwner(name)).body[0])

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # `stop` has ended the service already.
                connection.sock.shutdown(2)
        for thread in self._threads:
            thread.join(5.0)
        for connection in self._connections:
            connection.close()


@pytest.fixture
def desktop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desktop]:
    """Yield a desktop without logged-in users; one bus is both session and system bus."""
    daemon = shutil.which("dbus-daemon")
    if daemon is None:
        pytest.skip("dbus-daemon is not installed")
    process = subprocess.Popen([daemon, "--session", "--print-address", "--nofork"], stdout=subprocess.PIPE, text=True)
    with process, process.stdout:  # type: ignore[union-attr]
        address = process.stdout.readline().strip()  # type: ignore[union-attr]
        for variable in ("DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS"):
            monkeypatch.setenv(variable, address)
        for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(variable, raising=False)
        desktop = Desktop(address)
        try:
            yield desktop
        finally:
            desktop.close()
            process.terminate()


@pytest.fixture
def write(tmp_path: Any) -> Callable[..., Any]:
    """Return a function that writes a one-line file as in /sys below a private root, and returns that root."""

    def write(directory: str, **files: object) -> Any:
        place = tmp_path / directory
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(f"{text}\n")
        return tmp_path

    return write
