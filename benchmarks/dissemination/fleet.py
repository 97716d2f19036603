"""The hub and node processes of a fleet, one for each link, as the benchmark controls them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.dissemination.links import HUB, Links, LinkSet, open_links
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan

MAX_LINE_BYTES = 2**22


async def obey(host: object) -> None:
    """Answer requests in the host's process, one JSON object per line, until the end of standard input.

    A request is {"id", "do", ...}: `do` names a method of `host`, and the other fields are the method's arguments.
    Requests run in parallel. The answer is {"id", "result"} or {"id", "error"}.
    """
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.create_task(_carry_out(host, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _carry_out(host: object, request: dict[str, Any]) -> None:
    number, method = request.pop("id"), getattr(host, request.pop("do"))
    try:
        answer = {"id": number, "result": await method(**request)}
    except Exception as error:  # noqa: BLE001 - The asking process raises it.
        answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)


ANSWER_S: Final = 300.0
HUB_MODULE: Final = "benchmarks.dissemination.hub_host"
NODE_MODULE: Final = "benchmarks.dissemination.node_host"


class HostFailed(Exception):
    """The process on a host (the hub or a node of the benchmark) ended, or failed to carry out a request."""


class Host:
    """The benchmark's connection to the process on one host. Make it with `Host.start`."""

    def __init__(self, process: asyncio.subprocess.Process, what: str) -> None:
        self._process = process
        self._what = what
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"answers of {what}")

    @classmethod
    async def start(cls, module: str, *arguments: str, prefix: list[str], log: Path) -> Host:
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*prefix, sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=MAX_LINE_BYTES,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return cls(process, f"{log.stem}, whose log is {log}")

    async def ask(self, do: str, **arguments: object) -> Any:
        """Send a request; return its result. Raises HostFailed, TimeoutError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        assert self._process.stdin is not None
        try:
            if self._reader.done():
                raise HostFailed(f"{self._what}: it has ended")
            self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
            async with asyncio.timeout(ANSWER_S):
                return await answer
        finally:
            del self._asked[number]

    async def end(self) -> None:
        """End the process. Kill it if it still runs after a few seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        await self._reader

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            asked = self._asked.get(answer["id"])
            if asked is None or asked.done():
                continue
            if "error" in answer:
                asked.set_exception(HostFailed(f"{self._what}: {answer['error']}"))
            else:
                asked.set_result(answer["result"])
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(HostFailed(f"{self._what}: it has ended"))


class Fleet:
    """Hub and node processes on separate hosts. Make it with `open_fleet`."""

    def __init__(self, net: Links | Wan, directory: Path) -> None:
        self.net = net
        self.directory = directory
        self._hosts: dict[int, Host] = {}

    @property
    def hub(self) -> Host:
        return self._hosts[HUB]

    @property
    def nodes(self) -> dict[int, Host]:
        """Return the nodes by host number; the first has the number 1."""
        return {number: host for number, host in self._hosts.items() if number != HUB}

    async def start(self, number: int, directory: Path | None = None) -> Host:
        """Start or restart a process on this host, with its data in `directory`."""
        name = "hub" if number == HUB else f"node{number}"
        where = directory or self.directory / name
        where.mkdir(parents=True, exist_ok=True)
        self._hosts[number] = await Host.start(
            HUB_MODULE if number == HUB else NODE_MODULE,
            *(self.net.address(number), str(where)),
            prefix=self.net.command(number),
            log=self.directory / f"{name}.log",
        )
        return self._hosts[number]

    async def of_nodes(self, do: str, **arguments: object) -> list[Any]:
        """Send a request to all nodes at once; return the answers in the nodes' order."""
        return await asyncio.gather(*(node.ask(do, **arguments) for node in self.nodes.values()))

    async def end(self) -> None:
        await asyncio.gather(*(host.end() for host in self._hosts.values()))


@asynccontextmanager
async def open_fleet(links: LinkSet | WanSet, num_nodes: int, directory: Path) -> AsyncIterator[Fleet]:
    """Start all processes. The processes and links end with the block."""
    opened = open_wan(num_nodes, links) if isinstance(links, WanSet) else open_links(num_nodes, links)
    with opened as net:
        fleet = Fleet(net, directory)
        try:
            for number in range(num_nodes + 1):
                await fleet.start(number)
            yield fleet
        finally:
            await fleet.end()
