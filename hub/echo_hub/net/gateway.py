"""The hub's end of all node websockets: receives and sends frames.

Only authenticated nodes get a websocket (`door`). Each connection is one task; an error ends only that connection. A
node's messages go to the `Inbox` in order; awaiting it applies backpressure. Messages to a node wait in a bounded
queue. A node whose queue fills up is disconnected; after it reconnects, both ends send again what was missed. Pieces of
artefacts yield to all other messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web
from aiohttp.abc import AbstractStreamWriter

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.client_address import client_ip, hub_host, place_of
from echo_hub.net.door import Door, Guest, GuestList, TurnedAway, refused
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.message_share import MessageShare
from echo_hub.net.node_connection import NodeConnection, Together
from echo_hub.net.nonces import Nonces
from echo_hub.net.pace import ConnectionPace
from echo_hub.net.peer_log import PeerLog
from echo_hub.net.penalties import HARMLESS, Fault, Penalties
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_hub.net.silence import Silence
from echo_shared.errors import CodecError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.signing.identity import Identity
from echo_shared.wire.congestion import LossPool
from echo_shared.wire.messages import (
    MAX_FRAME_FROM_NODE_BYTES,
    FromHub,
    FromNode,
    Goodbye,
    RefusalCode,
    Welcome,
)
from echo_shared.wire.sessions import HubSession, SessionState

log = logging.getLogger(__name__)

WELCOME_S: Final = 20.0
"""Longest time for the hub to admit an authenticated node, in seconds."""
NO_LIMIT: Final = 2**62
"""Switches off aiohttp's write limit: `NodeConnection` sets a limit of its own and waits for buffer space itself."""
HEARTBEATS_MISSED: Final = 6
"""Number of heartbeat intervals without a message after which a node counts as disconnected."""

_PINGS: Final = (WSMsgType.PING, WSMsgType.PONG)
_SILENT: Final = RemoteProtocolError("The node stayed silent for too long.", do="Check the network, then join again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A connected node: its proven key, its own claims (name, engine, price and more), and the addresses that the hub
    sees.
    """

    node_id: str
    public_key: bytes
    name: str
    backend: str
    device: str
    host: str
    """The IP address from which the hub sees the node connect."""
    hub_host: str
    """The host name or address under which the node reached the hub."""
    swarm_port: int
    mesh_port: int
    """Port on which the node accepts pieces from other nodes; 0 if it accepts none."""
    cost_per_hour: float = 0.0
    """Price that the node asks while active, in US dollars per hour."""
    power_watts: float = 0.0
    """Power draw as stated by the node, in watts; 0 = not stated."""
    invite_id: int | None = None
    """Id of the personal invite that the node joined with; None if it used none."""
    hears_totals: bool = False
    """True if the node understands Totals messages."""
    knows_answered: bool = False
    """True if the node understands the receipt state ANSWERED."""
    knows_session_lost: bool = False
    """True if the node understands the drop reason SESSION_LOST."""
    answers: bool = True
    """False if the node does no work for tenants."""
    refuses: tuple[str, ...] = ()
    """Names of tenants for which the node does not work."""
    owner_key: bytes = b""
    """Public key of the node's owner, proven by `owner_claim`; empty = the node belongs to no fleet."""
    owner_claim: bytes = b""
    punches: bool = False
    """True if the node links with others through routers, see `net.rendezvous`."""


class Inbox(GuestList, Protocol):
    """Receives what happens on the nodes' connections: joins, messages, ends."""

    async def node_joined(self, node: NodeInfo) -> Welcome:
        """Register a node and return its Welcome. The gateway reads the node's first message only after queueing the
        Welcome.
        """

    async def node_said(self, node_id: str, message: FromNode, frame: bytes) -> None:
        """Handle a message that arrived in an open session. `frame` holds its bytes. Calls come in the order of
        arrival.
        """

    async def node_left(self, node_id: str) -> None:
        """Handle the end of the node's connection, for whatever reason."""


class Elsewhere(Protocol):
    """Connections that other processes hold for the same hub."""

    def displace(self, node_id: str) -> bool:
        """Close the node's connection; return True if there was one. The inbox is not notified."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A push whose message is built when the send queue reaches it."""

    session: HubSession
    message: DeferredMessage

    def frame(self) -> bytes | None:
        built = self.message.build() if self.session.state is SessionState.OPEN else None
        return None if built is None else self.session.send(built)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A push whose frame another process has encoded already."""

    encoded: bytes

    def frame(self) -> bytes:
        return self.encoded


class Gateway:
    """The nodes' connections to one port. `net.live_nodes.NodeConnections` explains `send`, `push` and `dismiss`."""

    def __init__(
        self,
        *,
        me: Identity,
        settings: ServerConfig,
        limits: ConnectionLimits,
        nonces: Nonces | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`nonces`: shared with other gateway processes; None: this process has its own."""
        self.faults: Counter[Fault] = Counter()
        """Number of faults of nodes on open connections, by kind."""
        self._elsewhere = elsewhere
        self._settings = settings
        self._limits = limits
        self._log = PeerLog(log)
        self._penalties = Penalties()
        self._door = Door(me=me, settings=settings, limits=limits, penalties=self._penalties, nonces=nonces)
        self._open: dict[str, NodeConnection] = {}
        self._together = Together()
        self._share = MessageShare()
        self._losses = LossPool()
        self._connections: set[NodeConnection] = set()
        """Open connections, and those that wait for their Welcome."""
        self._farewells: set[asyncio.Task[None]] = set()

    def routes(self, inbox: Inbox) -> list[web.AbstractRouteDef]:
        """Return the route of the nodes' websockets. Their messages go to `inbox`."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                guest = await self._door.enter(request, inbox)
                node = self._node(guest, request)
                self._limits.count_frames(request, partial(self._blame, node, Fault.TOO_MANY_FRAMES))
            except TurnedAway as turned:
                return turned.response
            except RemoteProtocolError as error:
                return self._door.refuse(error)
            return await self._serve(request, guest.session, node, inbox)

        return [web.get("/node", answer)]

    async def identify(self, request: web.Request, inbox: Inbox) -> str:
        """Authenticate a request and return its node's id, if the node may join. Raises TurnedAway."""
        return (await self._door.enter(request, inbox)).session.node_id

    def refuse(self, error: EchoError) -> web.Response:
        return self._door.refuse(error)

    def send(self, node_id: str, message: FromHub) -> bool:
        connection = self._open.get(node_id)
        if connection is None or connection.session.state is not SessionState.OPEN:
            return False
        return connection.send(connection.session.send(message)) or self._give_up(connection, node_id)

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        connection = self._open.get(node_id)
        if connection is None or connection.session.state is not SessionState.OPEN:
            return False
        return connection.queue.push(_Deferred(connection.session, message), rank) or self._give_up(connection, node_id)

    def relay(self, node_id: str, frame: bytes, rank: Rank | None = None) -> bool:
        """Queue a frame that another process has encoded: like `send`, or like `push` if it has a `rank`."""
        connection = self._open.get(node_id)
        if connection is None or connection.session.state is not SessionState.OPEN:
            return False
        is_taken = connection.send(frame) if rank is None else connection.queue.push(_Encoded(frame), rank)
        return is_taken or self._give_up(connection, node_id)

    def _give_up(self, connection: NodeConnection, node_id: str) -> Literal[False]:
        if connection.abort():  # The reader task then ends, and tells the inbox that the node has left.
            self.faults[Fault.NOT_READING] += 1
            extra = {"event": "node_left", "subject": node_id}
            self._log.warning("node %s does not read what it is sent: disconnecting it", node_id, extra=extra)
        return False

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        connection = self._open.get(node_id)
        if connection is not None:
            self._part_with(connection, node_id, code, what)

    async def close(self, code: RefusalCode, what: str) -> None:
        """Tell every node why the hub closes the connection, and close it."""
        farewells = [connection.dismiss(connection.session.refuse(code, what)) for connection in self._connections]
        await asyncio.gather(*farewells)

    async def _serve(
        self, request: web.Request, session: HubSession, node: NodeInfo, inbox: Inbox
    ) -> web.WebSocketResponse:
        # Token ids hardly compress, and each attempt would cost time of the hub's only event loop.
        socket = web.WebSocketResponse(
            max_msg_size=MAX_FRAME_FROM_NODE_BYTES,
            heartbeat=self._settings.heartbeat_s * 2,
            compress=False,
            autoping=False,  # aiohttp would answer every ping, and buffer the answers without limit.
            writer_limit=NO_LIMIT,
        )
        try:
            stream = await socket.prepare(request)
        except web.HTTPException as refusal:
            refusal.force_close()  # Without the close, the bytes that follow would be counted as websocket frames.
            raise
        except ValueError as error:  # aiohttp's own error response fails if headers contain non-text bytes.
            bad_request = web.HTTPBadRequest(text="This is not a websocket handshake.\n")
            bad_request.force_close()
            raise bad_request from error
        assert stream is not None, "a websocket's response has a stream"
        connection = NodeConnection(
            socket, session, request.transport, self._together, self._losses, place_of(node.host)
        )
        self._connections.add(connection)
        try:
            await self._converse(connection, node, stream, inbox)
        except RefusedError as error:
            await self._refuse(connection, error)
        except RemoteProtocolError as error:
            self._blame(node, _fault_of(error))
            await self._refuse(connection, error)
        except TimeoutError:
            self._blame(node, Fault.SILENT)
            await self._refuse(connection, _SILENT)
        except ConnectionError as error:
            extra = {"event": "node_left", "subject": node.node_id}
            self._log.info("the connection of node %s broke: %s", node.node_id, error, extra=extra)
        except Exception:  # noqa: BLE001  # The linter does not see that this is logged.
            self._log.exception("a node's connection ended because of an error in the hub")
            await self._refuse(connection, EchoError("The hub failed on this connection.", do="Try again later."))
        finally:
            self._connections.discard(connection)
            await connection.end()
        return socket

    async def _converse(
        self, connection: NodeConnection, node: NodeInfo, stream: AbstractStreamWriter, inbox: Inbox
    ) -> None:
        session = connection.session
        async with asyncio.timeout(WELCOME_S):
            if self.displace(node.node_id) or self._displace_elsewhere(node.node_id):
                await inbox.node_left(node.node_id)
            welcome = await inbox.node_joined(node)
            self._displace_elsewhere(node.node_id)  # The node may have connected elsewhere meanwhile.
        if session.state is SessionState.CLOSED:  # The hub is stopping; the node was told.
            if node.node_id not in self._open:
                await inbox.node_left(node.node_id)
            return
        self.displace(node.node_id)  # Meanwhile another connection of this node may have joined.
        self._open[node.node_id] = connection
        connection.queue.put(session.welcome(welcome))
        connection.start_writing(stream, node.node_id)
        pace = ConnectionPace(now=self._limits.now())
        try:
            async with Silence(HEARTBEATS_MISSED * self._settings.heartbeat_s) as silence:
                while (frame := await self._next_frame(connection, node, silence)) is not None:
                    if session.is_closed:  # The hub has refused the node, which still sends.
                        return
                    message = session.receive(frame)
                    if isinstance(message, Goodbye):
                        said = message.reason or "no reason given"
                        extra = {"event": "node_left", "subject": node.node_id}
                        self._log.info("node %s left: %s", node.node_id, said, extra=extra)
                        return
                    self._penalties.behaved(node.node_id)
                    await inbox.node_said(node.node_id, message, frame)
                    if (wait_s := pace.wait_s(len(frame), now=self._limits.now())) > 0:
                        self.faults[Fault.TOO_FAST] += 1
                        await asyncio.sleep(wait_s)
                    await self._share.rest()
            extra = {"event": "node_left", "subject": node.node_id}
            self._log.info("node %s is gone: its connection was closed", node.node_id, extra=extra)
        finally:
            # Remove the connection before the next await, so that later sends fail.
            was_open = self._forget(node.node_id, connection)
            connection.queue.end()
            if was_open:
                await inbox.node_left(node.node_id)

    def _node(self, guest: Guest, request: web.Request) -> NodeInfo:
        session = guest.session
        hello, proof = session.hello, session.proof
        assert hello is not None and proof is not None, "the door admits only authenticated nodes"
        return NodeInfo(
            node_id=session.node_id,
            public_key=hello.node_key,
            name=proof.name,
            backend=proof.backend,
            device=proof.device,
            host=client_ip(request, self._settings.trusted_proxies),
            hub_host=hub_host(request),
            swarm_port=proof.swarm_port,
            mesh_port=proof.mesh_port,
            cost_per_hour=proof.cost_per_hour,
            power_watts=proof.power_watts,
            invite_id=guest.invite_id,
            hears_totals=proof.hears_totals,
            knows_answered=proof.knows_answered,
            knows_session_lost=proof.knows_session_lost,
            answers=proof.answers,
            refuses=proof.refuses,
            owner_key=b"" if proof.owner is None else proof.owner.owner_key,
            owner_claim=b"" if proof.owner is None else proof.owner.signature,
            punches=proof.punches,
        )

    def displace(self, node_id: str) -> bool:
        """Close the node's older connection because it connects again; return True if there was one. The inbox is not
        notified.

        Does not wait for the close: the older connection may be dead and never take the message.
        """
        old = self._open.pop(node_id, None)
        if old is None:
            return False
        self._part_with(old, node_id, RefusalCode.ALREADY_CONNECTED, "This node has connected again elsewhere.")
        return True

    def _displace_elsewhere(self, node_id: str) -> bool:
        return self._elsewhere is not None and self._elsewhere.displace(node_id)

    def _part_with(self, connection: NodeConnection, node_id: str, code: RefusalCode, what: str) -> None:
        farewell = asyncio.create_task(
            connection.dismiss(connection.session.refuse(code, what)), name=f"farewell to {node_id}"
        )
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    async def _next_frame(self, connection: NodeConnection, node: NodeInfo, silence: Silence) -> bytes | None:
        """Return the next binary frame of the node; None once the connection is closed."""
        silence.listens()  # The timeout of aiohttp's `receive` would restart with every pong.
        while (received := await connection.socket.receive()).type in _PINGS:
            if received.type is WSMsgType.PING:
                connection.answer_ping(bytes(received.data))
        silence.heard()
        if received.type is WSMsgType.BINARY:
            frame: bytes = received.data
            return frame
        # aiohttp itself has closed the connection, or the node sent something other than a binary frame.
        if received.type is WSMsgType.ERROR and isinstance(received.data, WebSocketError):
            is_large = received.data.code == WSCloseCode.MESSAGE_TOO_BIG
            self._blame(node, Fault.TOO_LARGE if is_large else Fault.BAD_WEBSOCKET)
        if received.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
            return None
        raise RemoteProtocolError(
            "A node sent something other than a binary frame.", got=received.type.name, code=Fault.NOT_BINARY
        )

    def _blame(self, node: NodeInfo, fault: Fault) -> None:
        self.faults[fault] += 1
        if fault not in HARMLESS:
            self._penalties.fault(place_of(node.host), node.node_id, now=self._limits.now())

    async def _refuse(self, connection: NodeConnection, error: EchoError) -> None:
        extra = {"event": "node_refused", "subject": connection.session.node_id, "data": {"code": error.code}}
        self._log.info("refusing a node: %s (%s)", error.what, error.got, extra=extra)
        said = refused(error)
        await connection.dismiss(connection.session.refuse(said.code, said.what, said.do))

    def _forget(self, node_id: str, connection: NodeConnection) -> bool:
        if self._open.get(node_id) is not connection:
            return False
        del self._open[node_id]
        return True

    @property
    def turned_away(self) -> dict[str, dict[str, int]]:
        """Number of refused nodes and of faults on open connections since the start, by reason."""
        return {"node": dict(self._door.refusals), "frame": {fault.value: n for fault, n in self.faults.items()}}


def _fault_of(error: RemoteProtocolError) -> Fault:
    if error.code == Fault.NOT_BINARY:
        return Fault.NOT_BINARY
    return Fault.NOT_DECODABLE if isinstance(error, CodecError) else Fault.OUT_OF_TURN
