"""The hub's table of gateways: which gateway each node is connected to, and the messages queued for each gateway.

Belongs to one event loop; nothing here waits. `fleet` sends the queued items and reports the received ones.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from echo_hub.gateways.items import Item, ItemKind
from echo_hub.net.send_queue import MakePush, Rank

WAITING_BYTES: Final = 2**26
"""Maximum number of bytes queued for one gateway. Above it the hub drops the gateway's line, so its nodes reconnect and
get the hub's state again."""
AROUND_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class GatewaySession:
    """A node's session through a gateway."""

    node_id: str
    number: int
    """Unique in this process. The numbers start at a random value, so a restarted hub repeats one with probability
    2**-60."""
    line: GatewayLine


@dataclass(slots=True, eq=False)
class GatewayLine:
    """The hub's connection to one gateway."""

    gateway_id: str
    heard_at: float
    """Monotonic time of the last message from the gateway."""
    heard: int = 0
    """Number of the gateway's last request."""
    sent: int = 0
    """Number of the last message sent to the gateway."""
    sessions: dict[int, GatewaySession] = field(default_factory=dict)
    outbox: list[Item] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes queued in the outbox."""
    pushes: list[tuple[Rank, int, int, MakePush]] = field(default_factory=list)
    """Low-priority messages: a heap of (rank, order, session, builder)."""
    is_over: bool = False

    def make_push(self) -> None:
        """Build the next push and append it to the outbox, unless the push has become useless."""
        rank, _, number, make = heappop(self.pushes)
        if number in self.sessions and (frame := make()) is not None:
            self.put([ItemKind.PUSH, number, frame, rank], len(frame))

    def put(self, item: Item, num_bytes: int = 0) -> None:
        """Append an item to the outbox."""
        self.outbox.append(item)
        self.num_bytes += num_bytes + AROUND_BYTES
        self.is_over = self.is_over or self.num_bytes > WAITING_BYTES


class GatewaySessions:
    """All sessions through gateways; at most one per node."""

    def __init__(self) -> None:
        self._of_node: dict[str, GatewaySession] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._pushes = itertools.count()
        self.lines: dict[str, GatewayLine] = {}
        """Gateways by their ids."""

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._of_node

    def __len__(self) -> int:
        return len(self._of_node)

    def of(self, node_id: str) -> GatewaySession | None:
        """Return the node's session through a gateway, or None."""
        return self._of_node.get(node_id)

    def begin(self, node_id: str, line: GatewayLine) -> GatewaySession:
        """Register the node as connected through this line; replaces an earlier session."""
        session = GatewaySession(node_id, next(self._numbers), line)
        self._of_node[node_id] = line.sessions[session.number] = session
        return session

    def current(self, node_id: str, number: int) -> bool:
        """Return True if this is still the node's current session."""
        session = self._of_node.get(node_id)
        return session is not None and session.number == number

    def end(self, node_id: str) -> GatewaySession | None:
        """Remove the node's session through a gateway and return it; None if there is none."""
        session = self._of_node.pop(node_id, None)
        if session is not None:
            session.line.sessions.pop(session.number, None)
        return session

    def left(self, number: int) -> str | None:
        """End a session that its gateway reported as closed. Return its node; None if the session is not known any
        more."""
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

    def push(self, node_id: str, rank: Rank, make: MakePush) -> bool:
        """Queue a low-priority message for the node's gateway; return False if the node has none."""
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        heappush(session.line.pushes, (rank, next(self._pushes), session.number, make))
        return True

    def say(self, node_id: str, kind: ItemKind, *content: object, num_bytes: int = 0) -> bool:
        """Queue an item for the node's gateway; return False if the node has none."""
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        session.line.put([kind, session.number, *content], num_bytes)
        return True
