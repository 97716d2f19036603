from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from echo_hub.gateways.broker import StoredMessage
from echo_hub.gateways.intake import Intake
from echo_hub.gateways.items import Item, ItemKind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.sessions import GatewayLine, GatewaySessions
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import LeaseReturned, RefusalCode, Rollout
from tests.echo_hub.gateways.world import rollout
from tests.echo_hub.net.gateway_parts import Book

RETURNED = LeaseReturned(lease_id=1, indices=(2,), reason="none")


@dataclass
class Delivered:
    """Stand-in for a message of the broker."""

    data: bytes
    acknowledged: asyncio.Queue[bytes]

    async def ack(self) -> None:
        self.acknowledged.put_nowait(self.data)


class Taking:
    def __init__(self) -> None:
        self.book, self.seal = Book(), Seal(Identity.generate())
        self.line, sessions = GatewayLine("gateway", heard_at=0.0), GatewaySessions()
        self.number = sessions.begin("node", self.line).number
        self.intake = Intake(seal=self.seal, subject="sent", inbox=self.book, sessions=sessions, books=self)
        self.let_go: asyncio.Queue[bytes] = asyncio.Queue()

    async def settled(self) -> None:
        """Return at once: everything counts as committed."""

    def stored(self, gateway: str, number: int, *items: Item) -> bytes:
        return self.seal.close("sent", [gateway, number, list(items)])

    async def take(self, message: bytes) -> None:
        delivered: Any = Delivered(message, self.let_go)
        await self.intake.take(StoredMessage(message, delivered))

    @property
    def returned(self) -> Item:
        return self.said(encode(RETURNED))

    def said(self, frame: bytes) -> Item:
        return [ItemKind.SAID, "node", self.number, frame]

    def rollout(self, frame: bytes, session: int) -> Item:
        return [ItemKind.ROLLOUT, "node", session, frame, "1-3"]


async def test_a_message_delivered_twice_is_handled_once() -> None:
    taking = Taking()
    first = taking.stored("gateway", 1, taking.returned)
    second = taking.stored("gateway", 2, taking.rollout(encode(rollout(3)), taking.number))
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


async def test_only_rollouts_of_an_ended_session_are_taken() -> None:
    taking = Taking()
    taking.number -= 1
    items = taking.returned, taking.rollout(encode(rollout(3)), taking.number)
    await taking.take(taking.stored("gateway", 1, *items))
    ((node_id, message),) = taking.book.said
    assert node_id == "node" and isinstance(message, Rollout) and message.rollout_id == "1-3"


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(RETURNED)[:-1], encode(rollout(3)).replace(b"stop", b"none")])
async def test_a_frame_that_does_not_decode_ends_its_connection(frame: bytes) -> None:
    taking = Taking()
    await taking.take(taking.stored("gateway", 1, taking.rollout(frame, taking.number), taking.said(frame)))
    assert taking.book.said == []
    assert [item[:3] for item in taking.line.outbox.take(2**20)] == [
        [ItemKind.PART, taking.number, RefusalCode.PROTOCOL_ERROR.value]
    ] * 2


async def test_an_item_of_another_release_is_logged_and_no_node_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    """Another release may store a rollout's fields in place of its frame."""
    taking = Taking()
    old: Item = [ItemKind.ROLLOUT, "node", taking.number, "1-3", 1, 7, 3]
    await taking.take(taking.stored("gateway", 1, old, taking.returned))
    assert [message for _, message in taking.book.said] == [RETURNED]
    assert taking.line.outbox.take(2**20) == []
    assert "another release" in caplog.text
