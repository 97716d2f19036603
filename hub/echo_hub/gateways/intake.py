"""Deliver the messages that gateways stored in JetStream to the hub's inbox, in order.

A message is settled (deleted from JetStream) when its effects are committed. So JetStream or the database always holds
a rollout whose node was told "received". If the hub is killed before it settles a message, it receives the message
again and recognises the rollouts by their ids. A message repeated after a lost connection, or by an attacker, is
recognised by its number.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from echo_hub.gateways.broker import StoredMessage
from echo_hub.gateways.items import Item, ItemKind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.sessions import GatewaySessions
from echo_hub.net.gateway import Inbox
from echo_shared.errors import CodecError, EchoError
from echo_shared.wire.codec import decode_from_node
from echo_shared.wire.messages import RefusalCode

log = logging.getLogger(__name__)


class Books(Protocol):
    """Commits the effects of nodes' messages. Implemented by `echo_hub.driving.driver`."""

    async def settled(self) -> None:
        """Wait until the effects of everything that the inbox received before this call are committed."""


class Intake:
    """Passes stored messages to the inbox. `books` tells when the effects of the messages are committed."""

    def __init__(
        self,
        *,
        seal: Seal,
        subject: str,
        inbox: Inbox,
        sessions: GatewaySessions,
        books: Books,
    ) -> None:
        self._seal = seal
        self._subject = subject
        self._inbox = inbox
        self._sessions = sessions
        self._books = books
        self._newest: dict[str, int] = {}
        """Number of the newest message that each gateway has stored in JetStream, by gateway id."""
        self._unsettled: list[StoredMessage] = []
        self._there_are = asyncio.Event()

    async def take(self, message: StoredMessage) -> None:
        try:
            gateway, number, items = self._seal.open(self._subject, message.data)
        except CodecError as error:
            log.warning("%s", error.brief)
            gateway, number, items = "", 0, ()
        if number <= self._newest.get(gateway, 0):
            items = ()
        else:
            self._newest[gateway] = number
        for item in items:
            try:
                await self._say(item)
            except EchoError as error:
                log.info("refusing a node: %s", error.brief, extra={"event": "node_refused", "subject": item[1]})
                self._sessions.dismiss(item[1], RefusalCode.PROTOCOL_ERROR, error.what)
            except Exception:
                log.exception("an error in the hub prevented it from handling a message of a node behind a gateway")
                self._sessions.dismiss(item[1], RefusalCode.PROTOCOL_ERROR, "The hub failed on this connection.")
        self._unsettled.append(message)
        self._there_are.set()

    async def _say(self, item: Item) -> None:
        kind, node_id, number = item[0], item[1], item[2]
        if kind in (ItemKind.ROLLOUT, ItemKind.SAID):
            if not isinstance(item[3], bytes):
                log.warning("dropping a message of node %s, which a gateway of another release stored", node_id)
                return
            # Accept a rollout even if its node has left, or the hub has restarted, in the meantime.
            if kind == ItemKind.ROLLOUT or self._sessions.current(node_id, number):
                await self._inbox.node_said(node_id, decode_from_node(item[3]), item[3])
        elif kind == ItemKind.LEFT:
            left = self._sessions.left(number)
            if left is not None:
                await self._inbox.node_left(left)
        else:
            raise CodecError("A gateway has stored an item of an unexpected kind.", got=str(kind))

    async def settle(self) -> None:
        """Delete messages from JetStream when the hub has committed their effects. Runs until cancelled."""
        while True:
            await self._there_are.wait()
            self._there_are.clear()
            settling, self._unsettled = self._unsettled, []
            await self._books.settled()
            for each in settling:
                await each.settle()
