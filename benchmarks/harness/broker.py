"""A NATS server with JetStream on loopback, which can be killed and started again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from echo_hub.gateways.broker import LEAST_PAYLOAD

PASSWORD: Final = "of-this-broker-alone"
STARTS_WITHIN_S: Final = 30.0
_WHERE: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"))
BINARY: Final = shutil.which("nats-server", path=_WHERE)


class BrokerFailed(Exception):
    """The server did not start."""


def lacking() -> str:
    """Why this machine cannot run a server; empty if it can."""
    if BINARY is None:
        return "there is no nats-server"
    return "" if importlib.util.find_spec("nats") else "nats-py is not installed"


class BrokerProcess:
    """A server whose stored messages survive a kill."""

    def __init__(self, directory: Path, *, max_payload: int = LEAST_PAYLOAD) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"nats://echo:{PASSWORD}@127.0.0.1:{self.port}"
        self._log = directory / "nats.log"
        self._config = directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f"max_payload: {max_payload}\n"
            f'jetstream {{ store_dir: "{directory / "jetstream"}" }}\n'
            f'authorization {{ user: echo, password: "{PASSWORD}" }}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until the server answers. Raises BrokerFailed."""
        assert BINARY is not None, "lacking() says so"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([BINARY, "-c", str(self._config)], stdout=log, stderr=log)
        until = time.monotonic() + STARTS_WITHIN_S
        while self._process.poll() is None and time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as there:
                if there.recv(4) == b"INFO":
                    return
        raise BrokerFailed(f"the NATS server has not come up: see {self._log}")

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def broker_process(directory: Path, *, max_payload: int = LEAST_PAYLOAD) -> Iterator[BrokerProcess]:
    """Run a server while the block runs. Raises BrokerFailed."""
    broker = BrokerProcess(directory, max_payload=max_payload)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()
