from __future__ import annotations

import asyncio
import time

import pytest

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.gateways.connections import Connections
from echo_hub.gateways.intake import Intake
from echo_hub.gateways.items import Item, ItemKind, rollout_item
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.sessions import GatewayLine
from echo_hub.net.gateway import Gateway
from echo_hub.net.nonces import Nonces
from echo_hub.net.server import Server
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import LeaseReturned
from tests.echo_hub.gateways.world import rollout
from tests.echo_hub.net.gateway_parts import Book

RETURNED = LeaseReturned(lease_id=1, indices=(2,), reason="none")


class Taking:
    """The hub's intake of messages, with one node that a gateway holds."""

    def __init__(self) -> None:
        me, self.book = Identity.generate(), Book()
        settings = ServerConfig(port=0)
        limits = Server(settings).limits
        gateway = Gateway(me=me, settings=settings, limits=limits, nonces=Nonces(bytes(32)), clock=time.time)
        connections = Connections(gateway)
        self.number = connections.sessions.begin("node", GatewayLine("gateway", heard_at=0.0)).number
        self.seal = Seal(me)
        self.intake = Intake(seal=self.seal, subject="sent", inbox=self.book, connections=connections, books=self)
        self.let_go: asyncio.Queue[bytes] = asyncio.Queue()

    async def settled(self) -> None:
        """Return at once: everything counts as committed."""

    def stored(self, gateway: str, number: int, *items: Item) -> bytes:
        return self.seal.close("sent", [gateway, number, list(items)])

    async def take(self, message: bytes) -> None:
        async def settle() -> None:
            self.let_go.put_nowait(message)

        await self.intake.take(message, settle)

    @property
    def returned(self) -> Item:
        return [ItemKind.SAID, "node", self.number, encode(RETURNED)]


async def test_a_message_delivered_twice_is_handled_once() -> None:
    taking = Taking()
    first = taking.stored("gateway", 1, taking.returned)
    second = taking.stored("gateway", 2, rollout_item("node", taking.number, rollout(3)))
    for message in (first, second, first, second):
        await taking.take(message)
    assert [type(message).__name__ for _, message in taking.book.said] == ["LeaseReturned", "Rollout"]
    settling = asyncio.create_task(taking.intake.settle())
    async with asyncio.timeout(10):
        settled = [await taking.let_go.get() for _ in range(4)]
    settling.cancel()
    assert settled == [first, second, first, second], "and is settled as often as it was delivered"


async def test_each_gateway_counts_for_itself() -> None:
    taking = Taking()
    for gateway in ("one", "other"):
        await taking.take(taking.stored(gateway, 1, taking.returned))
    assert len(taking.book.said) == 2


async def test_a_message_that_a_stranger_sealed_is_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    taking = Taking()
    await taking.take(Seal(Identity.generate()).close("sent", ["gateway", 1, [taking.returned]]))
    assert taking.book.said == [] and len(caplog.records) == 1
