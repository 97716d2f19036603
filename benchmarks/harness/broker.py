"""A NATS server with JetStream on loopback that can be killed and restarted."""

from __future__ import annotations

import asyncio
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

from benchmarks.harness.site import RunFailed
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways.broker import LEAST_PAYLOAD, Broker
from echo_hub.gateways.subjects import Subjects
from echo_hub.store.database import read_meta
from echo_hub.store.store import Store
from echo_shared.errors import ConnectError

PASSWORD: Final = "of-this-broker-alone"
STARTS_WITHIN_S: Final = 30.0
LOOK_S: Final = 0.2
TAKEN_WITHIN_S: Final = 120.0
_WHERE: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"))
BINARY: Final = shutil.which("nats-server", path=_WHERE)


class BrokerFailed(Exception):
    """Error: the NATS server did not start."""


def lacking() -> str:
    """Return why this machine cannot run a NATS server; "" if it can."""
    if BINARY is None:
        return "there is no nats-server"
    return "" if importlib.util.find_spec("nats") else "nats-py is not installed"


class BrokerProcess:
    """A NATS server whose stored messages survive a kill."""

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
        """Start the server, and wait until it answers. Raises BrokerFailed."""
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
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def broker_process(directory: Path, *, max_payload: int = LEAST_PAYLOAD) -> Iterator[BrokerProcess]:
    """Run a NATS server during the block. Raises BrokerFailed."""
    broker = BrokerProcess(directory, max_payload=max_payload)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def run_id_of(store_url: str) -> str:
    store = Store.open(store_url, beside_hub=True)
    try:
        return store.read(read_meta)["run_id"]
    finally:
        store.close()


def wait_until_taken(broker: BrokerProcess, run_id: str) -> None:
    """Wait until the hub has committed all messages that the broker holds for it. Raises RunFailed."""
    asyncio.run(_until_taken(broker.url, Subjects(run_id).stream))


async def _until_taken(url: str, stream: str) -> None:
    client = await Broker.open(GatewaysConfig(url=url), name="benchmark")
    give_up_at = time.monotonic() + TAKEN_WITHIN_S
    try:
        while time.monotonic() < give_up_at:
            try:
                if not await client.waiting(stream):
                    return
            except ConnectError as error:
                raise RunFailed(f"the stream cannot be read: {error.brief}") from error
            await asyncio.sleep(LOOK_S)
    finally:
        await client.close()
    raise RunFailed(f"the hub has not committed the stored messages within {TAKEN_WITHIN_S:g} s")
