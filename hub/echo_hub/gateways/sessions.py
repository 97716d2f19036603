"""The hub's table of gateways: the gateway of each node, and the items queued for each gateway.

The table belongs to one event loop, and nothing here waits. `fleet` sends the queued items and reports the received
ones.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from echo_hub.gateways.items import Item, ItemKind, ItemQueue
from echo_hub.net.send_queue import DeferredMessage, Rank
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import FromHub, RefusalCode

WAITING_BYTES: Final = 2**26
"""Maximum number of bytes that are queued for one gateway. If there are more, the hub drops the gateway's line. Then
the gateway's nodes reconnect and get the hub's state again."""
ELSEWHERE: Final = "This node has connected again elsewhere."


@dataclass(frozen=True, slots=True)
class GatewaySession:
    node_id: str
    number: int
    """Number of the session, unique in this process. Numbers start at a random value, so a restarted hub repeats a
    number only with probability 2**-60."""
    line: GatewayLine


@dataclass(slots=True, eq=False)
class GatewayLine:
    """The hub's line (a numbered message stream) to one gateway."""

    gateway_id: str
    heard_at: float
    """Monotonic time of the last message from the gateway."""
    heard: int = 0
    """Sequence number of the gateway's last request."""
    sent: int = 0
    """Sequence number of the last message sent to the gateway."""
    sessions: dict[int, GatewaySession] = field(default_factory=dict)
    outbox: ItemQueue = field(default_factory=ItemQueue)
    pushes: list[tuple[Rank, int, int, DeferredMessage]] = field(default_factory=list)
    """Low-priority messages: a heap of (rank, order, session, message)."""
    is_over: bool = False

    def make_push(self) -> None:
        """Build the next push and append it to the outbox. If the push has become useless, only drop it."""
        rank, _, number, deferred = heappop(self.pushes)
        if number in self.sessions and (message := deferred.build()) is not None:
            frame = encode(message)
            self.put([ItemKind.PUSH, number, frame, rank], len(frame))

    def put(self, item: Item, frame_bytes: int = 0) -> None:
        self.outbox.put(item, frame_bytes)
        self.is_over = self.is_over or self.outbox.num_bytes > WAITING_BYTES


class GatewaySessions:
    """All sessions through gateways. A node has at most one. `net.live_nodes.NodeConnections` explains `send`, `push`
    and `dismiss`."""

    def __init__(self) -> None:
        self._of_node: dict[str, GatewaySession] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._pushes = itertools.count()
        self.lines: dict[str, GatewayLine] = {}
        self.news = asyncio.Event()
        """Set when an item or a push is queued for a gateway."""

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._of_node

    def begin(self, node_id: str, line: GatewayLine) -> GatewaySession:
        """Register the node as connected through this line. An earlier session of the node is replaced."""
        session = GatewaySession(node_id, next(self._numbers), line)
        self._of_node[node_id] = line.sessions[session.number] = session
        return session

    def current(self, node_id: str, number: int) -> bool:
        """Return True if this is still the node's current session."""
        session = self._of_node.get(node_id)
        return session is not None and session.number == number

    def end(self, node_id: str) -> bool:
        """Remove the node's session through a gateway. Return False if the node has none."""
        session = self._of_node.pop(node_id, None)
        if session is not None:
            session.line.sessions.pop(session.number, None)
        return session is not None

    def left(self, number: int) -> str | None:
        """End a session that its gateway has reported as closed. Return the session's node, or None if the session is
        no longer known."""
        for line in self.lines.values():
            session = line.sessions.get(number)
            if session is not None:
                self.end(session.node_id)
                return session.node_id
        return None

    def end_line(self, line: GatewayLine) -> list[str]:
        """Remove a lost gateway and return the nodes that were connected through it."""
        line.is_over = True
        if self.lines.get(line.gateway_id) is line:
            del self.lines[line.gateway_id]
        nodes = [session.node_id for session in line.sessions.values()]
        for node_id in nodes:
            del self._of_node[node_id]
        line.sessions.clear()
        return nodes

    def send(self, node_id: str, message: FromHub) -> bool:
        frame = encode(message)
        return self._put(node_id, ItemKind.SEND, frame, frame_bytes=len(frame))

    def push(self, node_id: str, message: DeferredMessage, rank: Rank) -> bool:
        """Queue a push. The hub builds the push's message when it sends it to the gateway. There the message again has
        low priority."""
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        heappush(session.line.pushes, (rank, next(self._pushes), session.number, message))
        self.news.set()
        return True

    def dismiss(self, node_id: str, code: RefusalCode, what: str) -> None:
        self._put(node_id, ItemKind.PART, code.value, what)  # The gateway then reports that the connection has ended.

    def displace(self, node_id: str) -> bool:
        """Close the connection of a node that connects again. Return True if there was one."""
        self.dismiss(node_id, RefusalCode.ALREADY_CONNECTED, ELSEWHERE)
        return self.end(node_id)

    def close(self, code: RefusalCode, what: str) -> None:
        """Close all connections at gateways, and tell the nodes why."""
        for line in self.lines.values():
            line.put([ItemKind.CLOSE, code.value, what])
        self.news.set()

    def _put(self, node_id: str, kind: ItemKind, *content: object, frame_bytes: int = 0) -> bool:
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        session.line.put([kind, session.number, *content], frame_bytes)
        self.news.set()
        return True
