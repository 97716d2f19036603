"""A gateway process. Its port looks like the hub's. The process itself holds nodes' websockets, and forwards all other
requests to the hub."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from echo_hub.config.sections import HubConfig
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.forwarding import Forwarding
from echo_hub.gateways.front import Front
from echo_hub.gateways.hub_line import HubLine
from echo_hub.gateways.items import ItemKind
from echo_hub.gateways.sealing import Seal, secret_of
from echo_hub.gateways.uplink import GatewayUplink
from echo_hub.net.gateway import Gateway
from echo_hub.net.nonces import Nonces
from echo_hub.net.server import Server, address
from echo_shared.errors import ConfigError
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import RefusalCode

log = logging.getLogger(__name__)

LAST_STORED_S: Final = 10.0
"""Longest time, in seconds, for which a stopping gateway waits until JetStream has stored what its nodes have sent."""


class GatewayProcess:
    """A running gateway. Create it with `open_gateway`."""

    def __init__(self, server: Server, front: Front, line: HubLine, uplink: GatewayUplink) -> None:
        self.server = server
        self._front = front
        self._line = line
        self._uplink = uplink

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._line.run(self._front))
            tasks.create_task(self._store())

    async def _store(self) -> None:
        await self._line.is_known.wait()
        assert self._line.subjects is not None
        async for items in self._uplink.stored(self._line.subjects.sent):
            self._front.stored(items)

    async def close(self, gateway: Gateway) -> None:
        """Disconnect the nodes, and store what they have sent."""
        await gateway.close(RefusalCode.SHUTTING_DOWN, "This gateway is stopping. Your node connects to another one.")
        if self._line.subjects is None:
            return
        storing = asyncio.create_task(self._store())
        try:
            async with asyncio.timeout(LAST_STORED_S):
                await self._uplink.flushed()
        except TimeoutError:
            log.warning("the last messages from nodes were not stored; the nodes send them again to another gateway")
        finally:
            storing.cancel()
            await asyncio.wait([storing])
        await self._line.ask([ItemKind.GONE])


@asynccontextmanager
async def open_gateway(config: HubConfig, me: Identity) -> AsyncIterator[GatewayProcess]:
    """Open a gateway and its port. `me` is the identity of the hub that the gateway serves. Raises ConfigError."""
    settings, serving = config.gateways, config.server
    if not settings.url:
        raise ConfigError(
            "This run has no gateways.",
            got="gateways.url is empty",
            do="Set it to the NATS server's address, nats://HOST:4222, and start the hub again.",
        )
    name = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        broker = await Broker.open(settings, name=f"echo-gateway-{name}")
        stack.push_async_callback(broker.close)
        listening = serving.model_copy(update={"host": settings.host or serving.host, "port": settings.port})
        server = Server(listening, shared=settings.port != 0 and hasattr(socket, "SO_REUSEPORT"))
        nonces = Nonces(secret_of(me, "nonces"))
        gateway = Gateway(me=me, settings=listening, limits=server.limits, nonces=nonces)
        seal = Seal(me)
        line = HubLine(broker, seal, hub_id=me.node_id, run_name=config.run.name)
        uplink = GatewayUplink(broker, seal, name=name)
        front = Front(gateway, line, uplink, hub_host=urlsplit(settings.hub_url).hostname or "")
        hub_url = settings.hub_url or address(serving.model_copy(update={"public_url": ""}), serving.port)
        forwarding = Forwarding(hub_url, serving.trusted_proxies)
        await forwarding.open()
        stack.push_async_callback(forwarding.close)
        await server.open([*gateway.routes(front), *forwarding.routes()])
        stack.push_async_callback(server.close)
        process = GatewayProcess(server, front, line, uplink)
        stack.push_async_callback(process.close, gateway)
        yield process
