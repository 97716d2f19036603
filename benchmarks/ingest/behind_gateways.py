"""Gateways before the hub of a case, all on one port, and the NATS server between gateways and hub."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness.broker import BrokerProcess
from benchmarks.harness.processes import RunFailed, served
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.subjects import Subjects
from echo_hub.store.database import read_meta
from echo_hub.store.store import Store
from echo_shared.errors import ConnectError

LOOK_S: Final = 0.2
TAKEN_WITHIN_S: Final = 120.0


@contextmanager
def gateway_processes(
    run: Path, hub_url: str, log: Path, *, number: int
) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Start gateways behind one address, whose connections the system divides among them. Yields their URL and their
    processes. Raises RunFailed."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:  # Keeps the port until the gateways have it.
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "echo_hub.main", "gateway", str(run), "--port", str(port)]
        env = {"ECHO_HUB_GATEWAYS__HUB_URL": hub_url}
        with ExitStack() as stack:
            gateways = [stack.enter_context(served(command, log, env=env, says="Gateway")) for _ in range(number)]
            taken.close()
            yield gateways[0][1], [process for process, _ in gateways]


def run_id_of(store_url: str) -> str:
    """Return the id of a run that was served before."""
    store = Store.open(store_url, beside_hub=True)
    try:
        return store.read(read_meta)["run_id"]
    finally:
        store.close()


def wait_until_taken(broker: BrokerProcess, run_id: str) -> None:
    """Wait until the hub has committed everything that the broker keeps. Raises RunFailed."""
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
    raise RunFailed(f"the hub has not taken in what is stored within {TAKEN_WITHIN_S:g} s")
