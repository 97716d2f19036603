"""The hub's end of its gateways. It keeps a line (a numbered message stream) to each gateway, admits the gateways'
nodes, and takes in the messages that gateways have stored.

Without gateways.url, this component does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.gateways.broker import Broker
from echo_hub.gateways.hub_line import GONE_S, HERE_S
from echo_hub.gateways.intake import Books, Intake
from echo_hub.gateways.items import Item, ItemKind
from echo_hub.gateways.sealing import Seal
from echo_hub.gateways.sessions import GatewayLine, GatewaySessions
from echo_hub.gateways.subjects import Subjects, beacon
from echo_hub.net.gateway import Elsewhere, Inbox, NodeInfo
from echo_hub.net.invitations import InviteEndedError
from echo_hub.net.nonces import Nonces
from echo_shared.errors import CodecError, ConnectError, LocalProtocolError, RefusedError
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import encode

log = logging.getLogger(__name__)

GATHER_S: Final = 0.005
"""Seconds for which messages to gateways are collected, so that one NATS message carries many."""
TOLD_BYTES: Final = 2**20
"""Approximate size limit of one message to a gateway, in bytes. A larger frame is sent alone."""
A_GAP: Final = 2**62
"""A message number far ahead of the expected one. A gateway that receives it concludes that messages are missing, and
begins a new line."""


class GatewayFleet:
    """All gateways of the hub. `own` holds the connections on the hub's own port. `nonces` use a secret that the
    gateways share."""

    def __init__(
        self,
        settings: GatewaysConfig,
        *,
        me: Identity,
        run_id: str,
        run_name: str,
        own: Elsewhere,
        sessions: GatewaySessions,
        nonces: Nonces,
    ) -> None:
        self._settings = settings
        self._subjects = Subjects(run_id)
        self._beacon = beacon(me.node_id)
        self._run_name = run_name
        self._own = own
        self._sessions = sessions
        self._nonces = nonces
        self._seal = Seal(me)
        self._epoch = time.time_ns()
        self._number = 0
        self._broker: Broker | None = None
        self._inbox: Inbox | None = None
        self._joining: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect to the broker, if one is configured. Raises ConfigError if that fails."""
        if self._settings.url:
            self._broker = await Broker.open(self._settings, name="echo-hub")
            await self._broker.make_stream(self._subjects.stream, self._subjects.sent)

    async def close(self) -> None:
        if self._broker is not None:
            await self._tell_all(self._broker)
            await self._broker.close()

    async def run(self, inbox: Inbox, books: Books) -> None:
        """Connect gateways to the hub until cancelled."""
        broker, self._inbox = self._broker, inbox
        if broker is None:
            return
        intake = Intake(seal=self._seal, subject=self._subjects.sent, inbox=inbox, sessions=self._sessions, books=books)
        await broker.subscribe(self._subjects.asked, self._asked)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broker.consume(self._subjects.stream, intake.take))
            tasks.create_task(intake.settle())
            tasks.create_task(self._tell(broker))
            tasks.create_task(self._beat(broker))

    # --- messages to gateways

    async def _tell(self, broker: Broker) -> None:
        while True:
            await self._sessions.news.wait()
            await asyncio.sleep(GATHER_S)
            self._sessions.news.clear()
            await self._tell_all(broker)

    async def _tell_all(self, broker: Broker) -> None:
        for line in tuple(self._sessions.lines.values()):
            while line.pushes and line.outbox.num_bytes < TOLD_BYTES:
                line.make_push()
            if line.pushes:  # Send the other pushes in the next round, after messages queued by then.
                self._sessions.news.set()
            try:
                while line.outbox and not line.is_over:
                    line.sent += 1
                    await self._publish(broker, line.gateway_id, line.sent, line.outbox.take(TOLD_BYTES))
            except ConnectError as error:
                log.warning("no message can be sent to gateway %s: %s", line.gateway_id, error.brief)
                line.is_over = True
            if line.is_over:
                await self._lose(line)

    async def _publish(self, broker: Broker, gateway_id: str, number: int, items: list[Item]) -> None:
        subject = self._subjects.told(gateway_id)
        await broker.publish(subject, self._seal.close(subject, [self._epoch, number, items]))

    async def _beat(self, broker: Broker) -> None:
        last = time.monotonic()
        while True:
            self._number += 1
            body = [self._epoch, self._number, self._subjects.run_id, self._run_name]
            try:
                await broker.publish(self._beacon, self._seal.close(self._beacon, body))
            except ConnectError as error:
                log.info("the hub's beacon could not be sent to the gateways: %s", error.brief)
            now = time.monotonic()
            was_asleep, last = now - last > GONE_S / 2, now
            for line in tuple(self._sessions.lines.values()):
                if was_asleep:  # The hub's machine slept. Messages that arrived during the sleep are still unread.
                    line.heard_at = now
                elif now - line.heard_at > GONE_S:
                    log.warning("gateway %s is gone, and so are %d nodes", line.gateway_id, len(line.sessions))
                    await self._lose(line)
                else:
                    line.put([ItemKind.HERE])
            self._sessions.news.set()
            await asyncio.sleep(HERE_S)

    async def _lose(self, line: GatewayLine) -> None:
        """Drop a lost gateway. Its nodes count as disconnected until they connect again."""
        assert self._inbox is not None, "lines begin once it runs"
        for node_id in self._sessions.end_line(line):
            await self._inbox.node_left(node_id)

    # --- requests of gateways

    async def _asked(self, message: bytes) -> None:
        try:
            gateway_id, epoch, number, item = self._seal.open(self._subjects.asked, message)
        except CodecError as error:
            log.warning("%s", error.brief)
            return
        if epoch != self._epoch:
            return
        line = self._sessions.lines.get(gateway_id)
        if line is None:
            line = await self._begun(gateway_id, number, item)
        if line is None or number <= line.heard:
            return
        line.heard, line.heard_at = number, time.monotonic()
        try:
            await self._answer(line, item)
        except Exception:
            log.exception("an error in the hub prevented an answer to a gateway")

    async def _begun(self, gateway_id: str, number: int, item: Item) -> GatewayLine | None:
        """Return a new line (numbered message stream) if this is the gateway's first message. For any other message of
        a gateway without a line, return None, and make the gateway begin a new line.
        """
        assert self._broker is not None
        if number == 1 and item[0] == ItemKind.HERE:
            log.info("gateway %s has connected", gateway_id)
            line = GatewayLine(gateway_id, time.monotonic())
            self._sessions.lines[gateway_id] = line
            line.put([ItemKind.HERE])
            self._sessions.news.set()
            return line
        if item[0] != ItemKind.GONE:
            await self._publish(self._broker, gateway_id, A_GAP, [])
        return None

    async def _answer(self, line: GatewayLine, item: Item) -> None:
        match ItemKind(item[0]):
            case ItemKind.HERE:
                pass
            case ItemKind.GONE:
                log.info("gateway %s has ended", line.gateway_id)
                await self._lose(line)
            case ItemKind.MEET:
                line.put(await self._met(*item[1:]))
                self._sessions.news.set()
            case ItemKind.JOIN:
                joining = asyncio.create_task(self._join(line, item[1], item[2]), name="a node joins by a gateway")
                self._joining.add(joining)
                joining.add_done_callback(self._joining.discard)
            case kind:
                raise LocalProtocolError("A gateway sent a request of an unexpected kind.", got=kind.name)

    async def _met(self, request: int, node_id: str, token: str | None, nonce: bytes) -> Item:
        assert self._inbox is not None
        try:
            self._nonces.use(nonce, now=time.time())
            invite_id, ended = None, None
            try:
                invite_id = self._inbox.find_invite(node_id, token)
            # Tell the gateway that the invite has ended; its own settings decide whether it refuses the node.
            except InviteEndedError as error:
                ended = error.what
            self._inbox.admit(node_id)
            return [ItemKind.MET, request, invite_id, invite_id is not None or self._inbox.knows(node_id), ended]
        except RefusedError as error:
            return _refusal(request, error)

    async def _join(self, line: GatewayLine, request: int, fields: dict[str, Any]) -> None:
        # MessagePack has no tuples.
        inbox, node = self._inbox, NodeInfo(**{**fields, "refuses": tuple(fields.get("refuses", ()))})
        assert inbox is not None
        try:
            if self._displace(node.node_id):
                await inbox.node_left(node.node_id)
            welcome = await inbox.node_joined(node)
        except RefusedError as error:
            line.put(_refusal(request, error))
        except Exception:
            log.exception("an error in the hub prevented a node from joining")
            line.put(_refusal(request, RefusedError("The hub failed on this connection.", do="Try again later.")))
        else:
            self._displace(node.node_id)  # The node may have connected elsewhere in the meantime.
            if line.is_over:
                await inbox.node_left(node.node_id)
                return
            session = self._sessions.begin(node.node_id, line)
            frame = encode(welcome)
            line.put([ItemKind.JOINED, request, session.number, frame], len(frame))
        self._sessions.news.set()

    def _displace(self, node_id: str) -> bool:
        return self._sessions.displace(node_id) or self._own.displace(node_id)


def _refusal(request: int, error: RefusedError) -> Item:
    return [ItemKind.REFUSED, request, error.code, error.what, error.got, error.do]
