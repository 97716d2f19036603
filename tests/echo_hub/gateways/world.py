"""A real message broker, real gateways and the hub's end of them in this process, and nodes on real sockets. `Book`
takes the place of the hub and records all messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import websockets

from benchmarks.harness.broker import BrokerProcess, broker_process
from echo_hub.config.sections import HubConfig
from echo_hub.gateways.connections import Connections
from echo_hub.gateways.process import GatewayProcess, open_gateway
from echo_hub.net.server import Server
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import FinishReason, FromHub, Receipts, Rollout, Welcome
from tests.echo_hub.net.gateway_parts import DEADLINE_S, Book, Node, node_at

RUN_ID = "run-0"


def rollout(number: int, *, lease_id: int = 1) -> Rollout:
    return Rollout(
        rollout_id=f"{lease_id}-{number}",
        lease_id=lease_id,
        group_id=7,
        index=number,
        policy_version_start=0,
        policy_version_end=0,
        completion_ids=np.arange(3, dtype=np.int32),
        behavior_logprobs=-np.ones(3, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
    )


class HubEnd:
    """The parts of a hub that nodes reach: its own port, and its side of the gateways. They serve until `kill`."""

    def __init__(self, config: HubConfig, me: Identity, book: Book) -> None:
        self.book = book
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.server = Server(config.server)
        self.connections = Connections(config, me, run_id=RUN_ID, limits=self.server.limits)
        self.fleet = self.connections.fleet
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self.fleet.open()
        await self.server.open(self.connections.own.routes(self.book))
        self._serving = asyncio.create_task(self.fleet.run(self.book, self))

    async def settled(self) -> None:
        await self.may_commit.wait()

    async def kill(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
            self._serving = None
            await self.fleet.close()
            await self.server.close()


class World:
    """A message broker with its hubs and gateways; `worlds` yields one."""

    def __init__(self, broker: BrokerProcess, stack: AsyncExitStack) -> None:
        self.broker = broker
        self.me = Identity.generate()
        self._stack = stack

    def config(self, join: str = "open", **gateways: object) -> HubConfig:
        return HubConfig.model_validate(
            {
                "server": {"port": 0, "heartbeat_s": 60.0, "trusted_proxies": ["127.0.0.1"], "join": join},
                "gateways": {"url": self.broker.url, "port": 0, **gateways},
            }
        )

    async def hub(self, book: Book | None = None) -> HubEnd:
        end = HubEnd(self.config(), self.me, book or Book())
        self._stack.push_async_callback(end.kill)
        await end.open()
        return end

    async def gateway(
        self, hub: HubEnd | None = None, *, me: Identity | None = None, join: str = "open"
    ) -> RunningGateway:
        url = "" if hub is None else f"http://127.0.0.1:{hub.server.port}"
        gateway = RunningGateway()
        self._stack.push_async_callback(gateway.stop)
        await gateway.start(self.config(join, hub_url=url), me or self.me)
        return gateway

    def node(self, url: str, me: Identity | None = None) -> Node:
        return node_at(url, self._stack, me)

    async def joined(self, url: str, me: Identity | None = None) -> Node:
        """Return a connected node. It tries again if refused, because the hub may not know a new gateway yet."""
        who = me or Identity.generate()
        while True:
            node = self.node(url, who)
            try:
                welcome = await node.join()
            except websockets.InvalidStatus:
                await asyncio.sleep(0)
                continue
            assert isinstance(welcome, Welcome), welcome
            return node


class RunningGateway:
    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self.process: GatewayProcess

    async def start(self, config: HubConfig, me: Identity) -> None:
        self.process = await self._stack.enter_async_context(open_gateway(config, me))
        self._serving = asyncio.create_task(self.process.serve())
        async with asyncio.timeout(DEADLINE_S):
            await self.process._line.has_begun.wait()

    @property
    def url(self) -> str:
        return self.process.server.url

    async def fall_silent(self) -> None:
        """Stop answering, but leave all connections open."""
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.wait([self._serving])

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
            self._serving = None
        await self._stack.aclose()


@asynccontextmanager
async def worlds(directory: Path) -> AsyncIterator[World]:
    with broker_process(directory) as broker:
        async with AsyncExitStack() as stack:
            yield World(broker, stack)


async def hear_receipts(node: Node, count: int) -> list[str]:
    """Return the rollout ids of the node's next `count` receipts, which must all say `received`."""
    found: list[str] = []
    while len(found) < count:
        said: FromHub = await node.hear()
        assert isinstance(said, Receipts), said
        found += [receipt.rollout_id for receipt in said.receipts]
    return found
