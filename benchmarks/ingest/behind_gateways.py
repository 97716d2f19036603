"""Gateways before the hub of a case, all on one port, and the NATS server between them and it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.broker import BrokerProcess
from benchmarks.harness.processes import RunFailed, ended
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.subjects import Subjects
from echo_hub.store.store import Store
from echo_shared.errors import ConnectError

LOOK_S: Final = 0.2
TAKEN_WITHIN_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateways:
    """Made by `gateway_processes`."""

    url: str
    """Of all together."""
    processes: tuple[subprocess.Popen[str], ...]


@contextmanager
def gateway_processes(run: Path, hub_url: str, log: Path, *, number: int) -> Iterator[Gateways]:
    """So many for the run, behind one address: the system divides connections among them. Raises RunFailed."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:  # While they start, it is nobody else's.
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "echo_hub.main", "gateway", str(run), "--port", str(port)]
        env = {**os.environ, "ECHO_HUB_GATEWAYS__HUB_URL": hub_url}
        with ExitStack() as stack, log.open("ab") as output:
            processes = tuple(
                stack.enter_context(_started([*command], env=env, output=output.fileno())) for _ in range(number)
            )
            urls = {_url_of(process, log) for process in processes}
            assert len(urls) == 1, urls
            taken.close()
            yield Gateways(url=urls.pop(), processes=processes)


@contextmanager
def _started(command: list[str], *, env: dict[str, str], output: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, env=env, text=True)
    with ended(process):
        yield process


def _url_of(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Gateway"):
            return line.split()[1]
    raise RunFailed(f"a gateway has not begun to serve: see {log}")


def run_id_of(store_url: str) -> str:
    """Of a run that was served."""
    store = Store.open(store_url, beside_hub=True)
    try:
        return store.run_meta()["run_id"]
    finally:
        store.close()


def wait_until_taken(broker: BrokerProcess, run_id: str) -> None:
    """Until the hub has committed all that is stored. Raises RunFailed."""
    asyncio.run(_until_taken(broker.url, Subjects(run_id).stream))


async def _until_taken(url: str, stream: str) -> None:
    client = await Broker.open(GatewaysConfig(url=url), name="benchmark")
    until = time.monotonic() + TAKEN_WITHIN_S
    try:
        while time.monotonic() < until:
            try:
                if not await client.waiting(stream):
                    return
            except ConnectError as error:
                raise RunFailed(f"the stream cannot be read: {error.brief}") from error
            await asyncio.sleep(LOOK_S)
    finally:
        await client.close()
    raise RunFailed(f"the hub has not taken in what is stored within {TAKEN_WITHIN_S:g} s")
