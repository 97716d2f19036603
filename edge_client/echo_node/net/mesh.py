"""Links: connections between the nodes of a run, on which nodes send each other pieces of the adapter's files. They
stay open across policy versions.

Either node of a pair may connect. If both connect, the node with the smaller id keeps its connection. If no link opens
soon, both connect through their routers (`hole_punching`); the node with the smaller id begins. A peer must be named by
the hub, and must prove that it holds the run's current key (`mesh_proof`). A new key restarts all links. A
node that sends invalid data loses its link and gets no new one for a while (a bar). The hub sends pieces that are lost
here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Final, cast

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.server import ServerProtocol

from echo_node.net.flow import Flow
from echo_node.net.hole_punching import AnswerWaits, HolePunching, HubSide
from echo_node.net.mesh_link import Link, MeshListener, SendCap
from echo_node.net.mesh_proof import Handshake, node_of
from echo_node.net.mesh_socket import Counted, Incoming, Outgoing
from echo_shared.errors import RemoteProtocolError, SwarmError
from echo_shared.process.backoff import backoff_s
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.messages import (
    MAX_HAND_ON_BYTES,
    MAX_PIECE_BYTES,
    Meet,
    MeshPeer,
    Piece,
    RunKey,
)
from echo_shared.wire.messages.fields import printable_line
from echo_shared.wire.sockets import is_loopback

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
FIRST_BAR_S: Final = 10.0
"""Length of a node's first bar (time without a new link after invalid data), in seconds. It is short, because on an
unencrypted connection anyone on the path can insert a wrong frame.
"""
LONGEST_BAR_S: Final = 600.0
"""Maximum length of a bar (time without a new link after invalid data), in seconds. Each bar of a node is twice as long
as its previous bar. After LONGEST_BAR_S seconds without faults, the node's next bar has the length FIRST_BAR_S again.
"""
MOST_HALF_OPEN: Final = 32
"""Maximum connections whose node has not proven its identity. One more closes the oldest."""
MOST_HALF_OPEN_OF_HOST: Final = 8
"""Maximum unproven connections from one address. Loopback is exempt, because all its connections share one address."""
_PING_S: Final = 15.0
_PONG_S: Final = 60.0
"""Seconds to wait for the answer to a ping. The ping waits behind pieces, which takes long on a slow uplink with many
links.
"""
_RETRY_FIRST_S: Final = 0.3
"""Seconds before the first retry. The hub's announcements to the two nodes may lie up to a second apart."""
_RETRY_LIMIT_S: Final = 30.0
PUNCH_FIRST_S: Final = 0.25
"""Seconds without a link before the first attempt to connect through both routers."""
PUNCH_FIRST_ACCEPTING_S: Final = 3.0
"""PUNCH_FIRST_S of a node with accepted plain connections: peers reach its port without hole punching."""
PUNCH_SPREAD_S: Final = 0.125
"""Maximum of the random time that is added to PUNCH_FIRST_S, for each peer. After a restart of the hub or a new key,
all nodes would otherwise connect at the same moment. With eight nodes, the attempts spread over about a second.
"""
PUNCH_AGAIN_S: Final = 4.0
"""Seconds before the first repetition of an attempt through both routers, doubled each time: most attempts succeed at
once or never.
"""
PUNCH_LIMIT_S: Final = 3_600.0
_FRAME_BYTES: Final = MAX_PIECE_BYTES + MAX_HAND_ON_BYTES + 256
_FRAMES_READ_AHEAD: Final = 4
_SILENT: Final = logging.Logger("mesh", logging.CRITICAL + 1)
"""A logger without output: the library would log input of unknown peers."""


class MeshLinks:
    """This node's links. Call `open` first; no peer is admitted before `set_keys`."""

    def __init__(
        self,
        me: Identity,
        *,
        upload_limit_bytes_s: int = 0,
        flow: Flow | None = None,
        punching: HolePunching | None = None,
    ) -> None:
        """`punching` None: if neither of two nodes accepts connections, this node makes no link through their
        routers.
        """
        self.port = 0
        """Listening port; 0 = none."""
        self.num_accepted = 0
        """Number of links that other nodes have opened by a plain connection (without hole punching). More than 0
        proves that other nodes can reach this one.
        """
        self._punching = punching
        self._me = me
        self._flow = flow or Flow()
        self._uplink = SendCap(upload_limit_bytes_s, self._flow)
        self._run_key: RunKey | None = None
        self._peers: dict[str, MeshPeer] = {}
        self._named: dict[int, str] = {}
        """Node id of each peer, by the number that the hub has given the peer."""
        self._connectors: dict[str, asyncio.Task[None]] = {}
        self._punchers: dict[str, asyncio.Task[None]] = {}
        """Tasks that link through routers, by the peer's id. The node with the smaller id keeps a task per peer; the
        node with the larger id runs a task during its answer.
        """
        self._answer_waits = AnswerWaits()
        self._links: dict[str, Link] = {}
        self._bars: dict[str, tuple[float, float]] = {}
        """(end time, length in seconds) of the last bar of each node, by node id. A barred node gets no new link."""
        self._half_open: dict[Connection, str] = {}
        """Connections whose node has not proven its identity, with their addresses, oldest first."""
        self._server: Server | None = None

    @property
    def links(self) -> tuple[str, ...]:
        """Ids of the nodes with a link to this one."""
        return tuple(sorted(self._links))

    @property
    def punched(self) -> tuple[str, ...]:
        """Ids of the nodes whose link goes through both routers."""
        return tuple(sorted(node_id for node_id, link in self._links.items() if link.is_punched))

    @property
    def sentence(self) -> str:
        """Number and kind of this node's links, in words to follow "This node is". Empty if there are no other
        nodes.
        """
        if not self._peers:
            return ""
        punched = f", {len(self.punched)} of them through both routers" if self.punched else ""
        accepts = "; other nodes can connect to this one" if self.num_accepted else ""
        lacks = "; the hub itself serves the rest" if len(self._links) < len(self._peers) else ""
        return f"linked with {len(self._links)} of {len(self._peers)} nodes{punched}{accepts}{lacks}"

    async def open(self, host: str, port: int, listener: MeshListener) -> None:
        """Listen on `host`; port 0 = any free port. Raises SwarmError."""
        self._listener = listener
        try:
            incoming = cast("type[ServerConnection]", partial(Incoming, self._admit))
            self._server = await serve(self._accept, host, port, create_connection=incoming, **_options())
        except OSError as error:
            raise SwarmError(
                "The node cannot listen for other nodes there.",
                got=f"{host}, port {port}: {error.strerror or error}",
                do="Choose another port, or another address.",
            ) from error
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def close(self) -> None:
        connectors = (*self._connectors.values(), *self._punchers.values())
        self._stop_connecting((*self._connectors, *self._punchers))
        self._abort_all()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        if connectors:
            await asyncio.wait(connectors)

    def set_keys(self, keys: Iterable[RunKey]) -> None:
        """Set the run's keys. Peers must hold the newest key. A new key restarts all links."""
        newest = max(keys, key=lambda key: key.key_id, default=None)
        if newest != self._run_key:
            self._run_key = newest
            self._stop_connecting(tuple(self._peers))
            self._abort_all()
            self._connect_to_all()

    def set_peers(self, peers: Iterable[MeshPeer]) -> None:
        """Set the peers that the hub has named: connect to peers with a port, end links with other nodes."""
        wanted = {peer.node_id: peer for peer in peers if peer.node_id != self._me.node_id}
        self._stop_connecting([name for name, peer in self._peers.items() if wanted.get(name) != peer])
        self._peers = wanted
        self._named = {peer.number: peer.node_id for peer in wanted.values()}
        for link in tuple(self._links.values()):
            if link.node_id not in wanted:
                link.abort()
        self._connect_to_all()

    def use_rendezvous(self, hub: HubSide, sighting_path: str) -> None:
        """Use this hub to link through routers; an empty path = do not link through routers."""
        if self._punching is not None:
            self._punching.use(hub, sighting_path)
            self._connect_to_all()

    def meet(self, meet: Meet) -> None:
        """Handle a peer's Meet message (addresses for hole punching). If it answers this node's own attempt, resume
        that attempt; else start to answer the peer's attempt.
        """
        if self._punching is None:
            return
        if meet.answers:
            self._punching.heard(meet)
        elif self._may_answer(meet.node_id):
            self._punchers[meet.node_id] = asyncio.create_task(self._answer(meet), name=f"meet-{meet.node_id}")

    def _may_answer(self, node_id: str) -> bool:
        """Return True if the peer's attempt may be answered: the peer has no link, no bar and no running answer, and
        respects the waiting times between attempts.
        """
        if self._run_key is None or node_id not in self._peers:
            return False
        if node_id in self._links or node_id in self._punchers or self._barred_for(node_id) > 0:
            return False
        return self._answer_waits.take(node_id, now=asyncio.get_running_loop().time())

    def hand_on(self, piece: Piece, branches: Iterable[tuple[int, bytes]]) -> None:
        """Send the piece to the nodes with these numbers. Each node gets its own part of the route. Nodes without a
        link, and nodes whose queue is full, are skipped.
        """
        frames: dict[bytes, bytes] = {}
        for number, below in branches:
            link = self._links.get(self._named.get(number, ""))
            if link is None:
                continue
            if below not in frames:
                frames[below] = encode(piece.model_copy(update={"hand_on": below}))
            if not link.put(frames[below], rank=-len(below)):
                log.debug("The queue to %s is full.", link.node_id)

    def is_linked_with(self, number: int) -> bool:
        """Return True if a link exists to the node that has this number from the hub."""
        return self._named.get(number, "") in self._links

    def drop(self, node_id: str, why: str) -> None:
        """End the node's link, and bar the node: it gets no new link for a while."""
        now = asyncio.get_running_loop().time()
        self._bars = {name: bar for name, bar in self._bars.items() if now < bar[0] + LONGEST_BAR_S}
        last_s = self._bars[node_id][1] if node_id in self._bars else FIRST_BAR_S / 2
        bar_s = min(2 * last_s, LONGEST_BAR_S)
        self._bars[node_id] = now + bar_s, bar_s
        log.warning("The link with the node %s is dropped: %s", node_id, printable_line(why))
        if (link := self._links.get(node_id)) is not None:
            link.abort()

    def _abort_all(self) -> None:
        for link in self._links.values():
            link.abort()
        for connection in self._half_open:
            connection.transport.abort()
        self._half_open.clear()

    def _stop_connecting(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._answer_waits.forget(node_id)
            for tasks in (self._connectors, self._punchers):
                if (task := tasks.pop(node_id, None)) is not None:
                    task.cancel()

    def _connect_to_all(self) -> None:
        if self._run_key is not None and self._server is not None:
            for node_id, peer in self._peers.items():
                if peer.port and node_id not in self._connectors:
                    self._connectors[node_id] = asyncio.create_task(self._keep_linked(peer), name=f"mesh-{node_id}")
                asks = self._punching is not None and self._punching.is_on and self._me.node_id < node_id
                if asks and node_id not in self._punchers:
                    self._punchers[node_id] = asyncio.create_task(self._keep_asking(node_id), name=f"punch-{node_id}")

    async def _keep_linked(self, peer: MeshPeer) -> None:
        """Connect to the peer whenever there is no link to it. Runs until cancelled. The node with the smaller id tries
        first.
        """
        first = 0 if self._me.node_id < peer.node_id else 2
        attempt = first
        while True:
            if attempt:
                wait_s = backoff_s(attempt - 1, random.random(), first_s=_RETRY_FIRST_S, limit_s=_RETRY_LIMIT_S)
                await asyncio.sleep(wait_s)
            await self._until_free(peer.node_id)
            linked = False
            try:
                socket = await _connected(host=peer.host, port=peer.port)
                linked = await self._run(socket, expected=peer.node_id)
            # ValueError: the host name is unknown, or the peer redirects.
            except (OSError, ValueError, EOFError, WebSocketException) as error:
                log.debug("No connection to the node %s: %s", peer.node_id, printable_line(str(error)))
            attempt = max(1, first) if linked else attempt + 1

    async def _keep_asking(self, node_id: str) -> None:
        """Whenever there is no link to this node, ask it for one through both routers. Runs until cancelled."""
        assert self._punching is not None
        attempt = 0
        while True:
            await self._until_free(node_id)
            wait_s = PUNCH_FIRST_ACCEPTING_S if self.num_accepted else PUNCH_FIRST_S
            wait_s += random.random() * PUNCH_SPREAD_S * len(self._peers)
            if attempt:
                wait_s = backoff_s(attempt - 1, random.random(), first_s=PUNCH_AGAIN_S, limit_s=PUNCH_LIMIT_S)
            await asyncio.sleep(wait_s)
            punched, linked = None, False
            try:
                async with self._punching.attempts:
                    if node_id in self._links:
                        attempt = 0
                        continue
                    punched = await self._punching.ask(node_id)
                if punched is not None:
                    linked = await self._run(await _connected(sock=punched), expected=node_id, is_punched=True)
            except (OSError, ValueError, EOFError, WebSocketException) as error:
                log.debug("No way through the routers to the node %s: %s", node_id, printable_line(str(error)))
            attempt = 0 if linked else attempt + 1

    async def _answer(self, meet: Meet) -> None:
        """Connect to a node that asked for a link through both routers. The connections are then handled like accepted
        ones.
        """
        assert self._punching is not None
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(self._punching.answer(meet)) as found:
                async for punched in found:
                    assert self._server is not None
                    await loop.connect_accepted_socket(partial(self._incoming, self._server), punched)
        except OSError as error:
            log.debug("No way through the routers to the node %s: %s", meet.node_id, printable_line(str(error)))
        finally:
            if self._punchers.get(meet.node_id) is asyncio.current_task():
                del self._punchers[meet.node_id]

    def _stop_answering(self, node_id: str) -> None:
        """Cancel the answer after its link is up, to free a slot for answers to other peers."""
        if self._me.node_id > node_id and (answer := self._punchers.pop(node_id, None)) is not None:
            answer.cancel()

    def _incoming(self, server: Server) -> ServerConnection:
        """Return the protocol for a connection that hole punching, not `server`, has accepted."""
        options = _options()
        protocol = ServerProtocol(max_size=options["max_size"], logger=options["logger"])
        names = ("ping_interval", "ping_timeout", "close_timeout", "max_queue")
        incoming = Incoming(self._admit, protocol, server, **{name: options[name] for name in names})
        incoming.is_punched = True
        return incoming

    async def _until_free(self, node_id: str) -> None:
        """Wait for the end of the node's link, and of the node's bar (time without a new link after invalid data)."""
        while True:
            wait_s = self._barred_for(node_id)
            if (link := self._links.get(node_id)) is not None:
                await link.ended.wait()
            elif wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                return

    def _barred_for(self, node_id: str) -> float:
        """Return the remaining seconds of the node's bar (time without a new link after invalid data); zero or less =
        none.
        """
        return self._bars[node_id][0] - asyncio.get_running_loop().time() if node_id in self._bars else 0.0

    def _admit(self, connection: Connection) -> None:
        """Count a new connection until its node has proven its identity, or it is closed."""
        host = str((connection.remote_address or ("",))[0])
        of_host = [] if is_loopback(host) else [other for other, its in self._half_open.items() if its == host]
        if len(of_host) >= MOST_HALF_OPEN_OF_HOST:
            self._close_unproven(of_host[0])
        elif len(self._half_open) >= MOST_HALF_OPEN:
            self._close_unproven(next(iter(self._half_open)))
        self._half_open[connection] = host
        connection.connection_lost_waiter.add_done_callback(lambda _: self._half_open.pop(connection, None))

    def _close_unproven(self, connection: Connection) -> None:
        del self._half_open[connection]
        connection.transport.abort()

    async def _accept(self, socket: ServerConnection) -> None:
        await self._run(socket, expected=None, is_punched=isinstance(socket, Incoming) and socket.is_punched)

    async def _run(self, socket: Connection, *, expected: str | None, is_punched: bool = False) -> bool:
        """Run a connection from start to end. Return True if it became a link (a proven connection). `expected`: id of
        the node to which this node connected. `is_punched`: the connection goes through both routers.
        """
        link = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                node_id = await self._prove(socket, expected)
            self._half_open.pop(socket, None)
            link = Link(node_id=node_id, socket=socket, opened_here=expected is not None, is_punched=is_punched)
            self.num_accepted += expected is None and not is_punched
            await self._keep(link)
        except (ConnectionClosed, TimeoutError, RemoteProtocolError) as error:
            log.debug("A connection between nodes has ended: %s", printable_line(str(error)))
            is_flooded = isinstance(socket, Counted) and socket.is_flooded
            if link is not None and (is_flooded or isinstance(error, RemoteProtocolError)):
                self.drop(link.node_id, "too many small frames" if is_flooded else str(error))
        except Exception:
            log.exception("A connection between nodes failed.")
        finally:
            socket.transport.abort()
        return link is not None

    async def _prove(self, socket: Connection, expected: str | None) -> str:
        """Run the handshake. Return the peer's id if a link is allowed. Raises RemoteProtocolError and
        ConnectionClosed.
        """
        if self._run_key is None:
            raise RemoteProtocolError("No node is admitted before the hub's Welcome.")
        own = Handshake(me=self._me, run_key=self._run_key.key, role=b"listens" if expected is None else b"connects")
        if expected is None:
            theirs = await _receive(socket)
            node_id = node_of(theirs)
            await socket.send(own.hello)
            own.check(theirs, await _receive(socket))
            await self._check_wanted(node_id, opened_here=False)
            await socket.send(own.proof(theirs))
        else:
            await socket.send(own.hello)
            theirs = await _receive(socket)
            node_id = node_of(theirs)
            if node_id != expected:
                raise RemoteProtocolError("The hub named another node at this address.", got=node_id)
            await socket.send(own.proof(theirs))
            own.check(theirs, await _receive(socket))
            await self._check_wanted(node_id, opened_here=True)
        return node_id

    async def _check_wanted(self, node_id: str, *, opened_here: bool) -> None:
        """Raise RemoteProtocolError if no new link with this node is allowed."""
        existing = self._links.get(node_id)
        if node_id not in self._peers:  # A holder of the run key could invent any number of node ids.
            raise RemoteProtocolError("The hub has not named this node.", got=node_id)
        if self._barred_for(node_id) > 0:
            raise RemoteProtocolError("A node that sent invalid data is still barred.", got=node_id)
        if existing is not None and not self._replaces(existing, opened_here=opened_here):
            await existing.socket.ping()  # If the existing link is dead, this ping shows it.
            raise RemoteProtocolError("A link exists already.", got=node_id)

    def _replaces(self, existing: Link, *, opened_here: bool) -> bool:
        """Return True if a new connection replaces the existing one. The connection that the node with the smaller id
        opened wins; if one node opened both, the newer one wins.
        """
        if existing.opened_here == opened_here:
            return True
        return opened_here == (self._me.node_id < existing.node_id)

    async def _keep(self, link: Link) -> None:
        """Register the link, and read it until it ends: by an exception, or by the peer's close."""
        loop, existing = asyncio.get_running_loop(), self._links.get(link.node_id)
        linked_at = loop.time()
        self._links[link.node_id] = link
        if link.is_punched and not link.opened_here:
            self._stop_answering(link.node_id)
        if existing is None:
            log.info("Linked with the node %s.", link.node_id)
            self._listener.linked(self.links)
        else:
            existing.abort()
        writer = asyncio.create_task(link.write(self._uplink), name=f"mesh-to-{link.node_id}")
        try:
            async for frame in link.socket:
                await self._flow.received(len(frame))
                piece = decode_from_hub(frame) if isinstance(frame, bytes) else None
                if not isinstance(piece, Piece):
                    raise RemoteProtocolError("A node may send only pieces.", got=type(piece).__name__)
                self._listener.take(piece, link.node_id)
        finally:
            writer.cancel()
            link.ended.set()
            self._answer_waits.linked(link.node_id, lasted_s=loop.time() - linked_at)
            if self._links.get(link.node_id) is link:
                del self._links[link.node_id]
                log.info("The link with the node %s has ended.", link.node_id)
                self._listener.linked(self.links)


def _options() -> dict[str, Any]:
    return {
        "compression": None,  # Pieces are encrypted, so they do not compress.
        "max_size": _FRAME_BYTES,
        "max_queue": _FRAMES_READ_AHEAD,
        "open_timeout": HANDSHAKE_S,
        "ping_interval": _PING_S,
        "ping_timeout": _PONG_S,
        "close_timeout": 1.0,
        "logger": _SILENT,
    }


async def _connected(**where: Any) -> Connection:
    """Open a websocket to a node. Raises OSError, ValueError, EOFError and WebSocketException."""
    return await connect(
        "ws://mesh/", create_connection=Outgoing, proxy=None, user_agent_header=None, **where, **_options()
    )


async def _receive(socket: Connection) -> bytes:
    """Return the peer's next handshake message. Raises RemoteProtocolError and ConnectionClosed."""
    frame = await socket.recv()
    if isinstance(frame, str):
        raise RemoteProtocolError("A node sent text instead of a proof.", got=f"{len(frame)} characters")
    return frame
