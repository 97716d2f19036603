"""The hub's end of every node's websocket: handshake, join policy, frames in and out.

Each connection is one task; its errors end that connection and no other. What a node says goes, in order, to the
`Inbox`, which applies backpressure by awaiting. What the hub says to a node waits in a bounded queue; a node that lets
it fill up is disconnected, and resends and is told again after it reconnects. Pieces of artefacts yield to all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from aiohttp import WSMsgType, web
from aiohttp.abc import AbstractStreamWriter

import echo_shared
from echo_hub.config.sections import ServerConfig
from echo_hub.net.client_address import client_ip, hub_host
from echo_hub.net.send_queue import Rank, SendQueue
from echo_shared.errors import EchoError, RefusedError, RemoteProtocolError
from echo_shared.identity import Identity
from echo_shared.messages import (
    MAX_FRAME_BYTES,
    FromHub,
    FromNode,
    Goodbye,
    Hello,
    Proof,
    RefusalCode,
    Welcome,
)
from echo_shared.sessions import HubSession, State
from echo_shared.sockets import keep_unsent_short

log = logging.getLogger(__name__)
_M = TypeVar("_M", Hello, Proof)

HANDSHAKE_BYTES: Final = 4_096
"""Most bytes of one message before a node has proven who it is."""

HANDSHAKE_S: Final = 20.0
FAREWELL_S: Final = 2.0
"""How long a node has to take the hub's last word."""
UNSENT_BYTES: Final = 8 * 1024
"""Unsent bytes that the system has taken for one node: a message waits behind so much of what was pushed, and one
push."""
NO_LIMIT: Final = 2**62
"""No limit of what may wait in a connection: only the writer waits for room. Reading, which answers pings, never
does."""
HEARTBEATS_MISSED: Final = 6
"""A node that says nothing for this many heartbeats is taken for gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Who connected: proven key, what it says of itself, and the addresses seen from here."""

    node_id: str
    public_key: bytes
    name: str
    backend: str
    device: str
    host: str
    """The node's address as the hub sees it."""
    hub_host: str
    """The name or address under which the node reached the hub."""
    swarm_port: int
    mesh_port: int
    """Where it takes pieces from other nodes; 0 = nowhere."""
    cost_per_hour: float = 0.0
    """What it asks for, in US dollars, while it is active."""
    power_watts: float = 0.0
    """What it says that it draws; 0 = not stated."""


class Inbox(Protocol):
    """Where the gateway's news goes."""

    async def node_joined(self, node: NodeInfo) -> Welcome:
        """Gives the answer to a node that may join. Its messages follow only after it is sent."""

    async def node_said(self, node_id: str, message: FromNode) -> None:
        """Takes a message of an open session, in order."""

    async def node_left(self, node_id: str) -> None:
        """Hears that the node's connection is gone, for whatever reason."""


class _Connection:
    """One node's websocket."""

    def __init__(self, socket: web.WebSocketResponse, session: HubSession, transport: asyncio.Transport | None) -> None:
        self.socket = socket
        self.session = session
        self.queue = SendQueue()
        self.writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._transport = transport
        if transport is not None:
            transport.set_write_buffer_limits(high=0)
            keep_unsent_short(transport, UNSENT_BYTES)

    def start_writing(self, stream: AbstractStreamWriter, node_id: str) -> None:
        """Begins to send what is queued to the node."""
        self.writer = asyncio.create_task(self._write(stream), name=f"write to {node_id}")

    async def _write(self, stream: AbstractStreamWriter) -> None:
        """Writes until the queue ends or the connection breaks, which its reader sees as well. Never cancel what may
        wait for room in a connection: all that do wait on one future of aiohttp's, and are cancelled with it."""
        try:
            while (frame := await self.queue.next()) is not None:
                await self.socket.send_bytes(frame)
                await stream.drain()
        except ConnectionError:
            return
        except Exception:
            log.exception("nothing more can be sent to a node")
            self.abort()

    async def dismiss(self, last_frame: bytes) -> None:
        """Sends the hub's last word and ends the connection, whether the node takes it or not."""
        await self._close(last_frame)

    async def end(self) -> None:
        """Returns once nothing is left of the connection; a last word that is on its way may arrive."""
        self.queue.end()
        await self._close(None)
        self.abort()
        if self.writer is not None:
            await asyncio.wait([self.writer])

    async def _close(self, last_frame: bytes | None) -> None:
        """Only the first call counts."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._say_and_close(last_frame))
        try:
            await asyncio.wait([self._closing], timeout=FAREWELL_S)
        finally:
            if not self._closing.done():
                self.abort()  # Which ends it.

    async def _say_and_close(self, last_frame: bytes | None) -> None:
        with contextlib.suppress(ConnectionError):  # Then it has ended.
            if last_frame is not None:
                await self.socket.send_bytes(last_frame)
            await self.socket.close()

    def abort(self) -> bool:
        """Ends the connection at once; False when it was ending already."""
        if self._transport is None:
            return False
        was_ending = self._transport.is_closing()
        self._transport.abort()
        return not was_ending


class Gateway:
    """All connected nodes. `send` and `push` never wait."""

    def __init__(self, *, me: Identity, settings: ServerConfig) -> None:
        self._me = me
        self._settings = settings
        self._open: dict[str, _Connection] = {}
        self._connections: set[_Connection] = set()
        """The open ones, and those in their handshake."""
        self._farewells: set[asyncio.Task[None]] = set()

    def routes(self, inbox: Inbox) -> list[web.AbstractRouteDef]:
        """The address of the nodes' websockets; what they say goes to `inbox`."""

        async def answer(request: web.Request) -> web.WebSocketResponse:
            return await self._serve(request, inbox)

        return [web.get("/node", answer)]

    def send(self, node_id: str, message: FromHub) -> bool:
        """Queues the message; False when the node is not connected (it will be told anew after it reconnects)."""
        connection = self._open.get(node_id)
        if connection is None or connection.session.state is not State.OPEN:
            return False
        return connection.queue.put(connection.session.send(message)) or self._give_up(connection, node_id)

    def push(self, node_id: str, make: Callable[[], FromHub | None], rank: Rank) -> bool:
        """Queues a message that yields to all others, to be made when its turn comes; None = there is no use for it any
        more. False when the node is not connected."""
        connection = self._open.get(node_id)
        if connection is None or connection.session.state is not State.OPEN:
            return False

        def frame() -> bytes | None:
            is_open = connection.session.state is State.OPEN
            message = make() if is_open else None
            return None if message is None else connection.session.send(message)

        return connection.queue.push(frame, rank) or self._give_up(connection, node_id)

    @staticmethod
    def _give_up(connection: _Connection, node_id: str) -> Literal[False]:
        if connection.abort():  # Its reader ends then, and tells the inbox.
            log.warning("node %s does not read what it is sent: disconnecting it", node_id)
        return False

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        """Ends this node's connection, if it has one, and tells it why; the inbox hears that it left. Never waits."""
        connection = self._open.get(node_id)
        if connection is not None:
            self._part_with(connection, node_id, code, what)

    async def close(self, code: RefusalCode, what: str) -> None:
        """Tells every node why the hub ends the connection, and ends it."""
        farewells = [connection.dismiss(connection.session.refuse(code, what)) for connection in self._connections]
        await asyncio.gather(*farewells)

    async def _serve(self, request: web.Request, inbox: Inbox) -> web.WebSocketResponse:
        # Token ids hardly compress, and every frame would cost the hub's one loop the time to try.
        socket = web.WebSocketResponse(
            max_msg_size=MAX_FRAME_BYTES,
            heartbeat=self._settings.heartbeat_s * 2,
            compress=False,
            writer_limit=NO_LIMIT,
        )
        try:
            stream = await socket.prepare(request)
        except ValueError as error:  # The library's own answer fails on headers that are no text.
            raise web.HTTPBadRequest(text="This is no websocket handshake.\n") from error
        assert stream is not None, "a websocket's response has a stream"
        session = HubSession(me=self._me, software_version=echo_shared.__version__, nonce=secrets.token_bytes(32))
        connection = _Connection(socket, session, request.transport)
        self._connections.add(connection)
        try:
            await self._converse(connection, request, stream, inbox)
        except (RefusedError, RemoteProtocolError, TimeoutError) as error:
            await self._refuse(connection, error)
        except ConnectionError as error:
            log.info("a node's connection broke: %s", error)
        except Exception:
            log.exception("a node's connection ended by an error of the hub's own")
            await self._refuse(connection, EchoError("The hub failed on this connection.", do="Try again later."))
        finally:
            self._connections.discard(connection)
            await connection.end()
        return socket

    async def _converse(
        self, connection: _Connection, request: web.Request, stream: AbstractStreamWriter, inbox: Inbox
    ) -> None:
        session = connection.session
        async with asyncio.timeout(HANDSHAKE_S):
            node = await self._handshake(connection, request)
            if self._replace(node.node_id):
                await inbox.node_left(node.node_id)
            welcome = await inbox.node_joined(node)
        self._replace(node.node_id)  # Another connection of this node may have been quicker.
        self._open[node.node_id] = connection
        connection.queue.put(session.welcome(welcome))
        connection.start_writing(stream, node.node_id)
        try:
            while (
                frame := await self._next_frame(connection, HEARTBEATS_MISSED * self._settings.heartbeat_s)
            ) is not None:
                message = session.receive(frame)
                if isinstance(message, Goodbye):
                    log.info("node %s left: %s", node.node_id, message.reason or "no reason given")
                    return
                await inbox.node_said(node.node_id, message)
        finally:
            was_open = self._forget(node.node_id, connection)  # Before anything is awaited: nobody may send to it now.
            connection.queue.end()
            if was_open:
                await inbox.node_left(node.node_id)

    async def _handshake(self, connection: _Connection, request: web.Request) -> NodeInfo:
        session = connection.session
        hello = await self._expect(connection, Hello)
        await connection.socket.send_bytes(session.challenge())
        proof = await self._expect(connection, Proof)
        self._check_token(proof)
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
        )

    def _replace(self, node_id: str) -> bool:
        """A node that connects again while its old connection still seems open has lost that one: end it.

        Nothing waits for that: the old connection may be dead, and take what it is sent for ever.
        """
        old = self._open.pop(node_id, None)
        if old is None:
            return False
        self._part_with(old, node_id, RefusalCode.ALREADY_CONNECTED, "This node has connected again elsewhere.")
        return True

    def _part_with(self, connection: _Connection, node_id: str, code: RefusalCode, what: str) -> None:
        farewell = asyncio.create_task(
            connection.dismiss(connection.session.refuse(code, what)), name=f"farewell to {node_id}"
        )
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    def _check_token(self, proof: Proof) -> None:
        if self._settings.join == "open":
            return
        given = (proof.invite_token or "").encode()
        if not any(hmac.compare_digest(given, token.encode()) for token in self._settings.invite_tokens):
            raise RefusedError(
                "This hub admits only nodes with an invite token.",
                got="no token" if proof.invite_token is None else "a token that it does not know",
                do="Ask the hub's operator for one, then: echo-node join URL --token TOKEN",
                code=RefusalCode.BAD_TOKEN,
            )

    async def _expect(self, connection: _Connection, kind: type[_M]) -> _M:
        frame = await self._next_frame(connection, HANDSHAKE_S)
        if frame is None:
            raise ConnectionResetError("closed during the handshake")
        if len(frame) > HANDSHAKE_BYTES:
            raise RemoteProtocolError("A message of the handshake is too large.", got=f"{len(frame)} bytes")
        message = connection.session.receive(frame)
        assert isinstance(message, kind)  # The session's state table allows nothing else here.
        return message

    @staticmethod
    async def _next_frame(connection: _Connection, timeout_s: float) -> bytes | None:
        """The next binary frame; None once the connection is closed."""
        # Not the timeout of `receive`, which begins anew with every pong.
        async with asyncio.timeout(timeout_s):
            received = await connection.socket.receive()
        if received.type is WSMsgType.BINARY:
            frame: bytes = received.data
            return frame
        if received.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
            return None
        raise RemoteProtocolError("A node sent something other than a binary frame.", got=received.type.name)

    @staticmethod
    async def _refuse(connection: _Connection, error: EchoError | TimeoutError) -> None:
        if isinstance(error, TimeoutError):
            error = RemoteProtocolError(
                "The node stayed silent for too long.", do="Check the network, then join again."
            )
        log.info("refusing a node: %s (%s)", error.what, error.got)
        code = error.code if isinstance(error, RefusedError) else RefusalCode.PROTOCOL_ERROR
        what = error.what if error.got is None else f"{error.what} ({error.got})"
        await connection.dismiss(connection.session.refuse(code, what[:2_000], (error.do or "")[:2_000]))

    def _forget(self, node_id: str, connection: _Connection) -> bool:
        """Whether this connection was the node's open one."""
        if self._open.get(node_id) is not connection:
            return False
        del self._open[node_id]
        return True
