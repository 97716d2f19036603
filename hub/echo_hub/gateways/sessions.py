"""The hub's end of all gateways: who is connected by which of them, and what waits to be said to each.

Belongs to one event loop; nothing here waits. `fleet` sends what waits, and says what has come.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from echo_hub.gateways.items import Item, Kind
from echo_hub.net.send_queue import MakePush, Rank

WAITING_BYTES: Final = 2**26
"""What a gateway leaves untaken beyond this ends its line: its nodes are told anew once they have connected again."""
AROUND_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Session:
    """A node's, by a gateway."""

    node_id: str
    number: int
    """Not given twice, nor, but by a chance of one in 2**60, by another process of this hub's."""
    line: Line


@dataclass(slots=True, eq=False)
class Line:
    """To one gateway."""

    gateway_id: str
    heard_at: float
    """By a clock that only goes forward."""
    heard: int = 0
    """The number of what it asked last."""
    sent: int = 0
    """Of what it was told last."""
    sessions: dict[int, Session] = field(default_factory=dict)
    outbox: list[Item] = field(default_factory=list)
    num_bytes: int = 0
    """Of what waits in the outbox."""
    pushes: list[tuple[Rank, int, int, MakePush]] = field(default_factory=list)
    """What yields to all that: a heap of rank, order, session and what makes it."""
    is_over: bool = False

    def make_push(self) -> None:
        """Puts the next push into the outbox, if it is of use still."""
        rank, _, number, make = heappop(self.pushes)
        if number in self.sessions and (frame := make()) is not None:
            self.put([Kind.PUSH, number, frame, rank], len(frame))

    def put(self, item: Item, num_bytes: int = 0) -> None:
        """Says it after all that waits."""
        self.outbox.append(item)
        self.num_bytes += num_bytes + AROUND_BYTES
        self.is_over = self.is_over or self.num_bytes > WAITING_BYTES


class Sessions:
    """A node has one at most."""

    def __init__(self) -> None:
        self._of_node: dict[str, Session] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._pushes = itertools.count()
        self.lines: dict[str, Line] = {}
        """By their gateways' names."""

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._of_node

    def __len__(self) -> int:
        return len(self._of_node)

    def of(self, node_id: str) -> Session | None:
        """The node's, if it is connected by a gateway."""
        return self._of_node.get(node_id)

    def begin(self, node_id: str, line: Line) -> Session:
        """The node is connected there from now on, and nowhere else."""
        session = Session(node_id, next(self._numbers), line)
        self._of_node[node_id] = line.sessions[session.number] = session
        return session

    def current(self, node_id: str, number: int) -> bool:
        """Whether this is the node's session still."""
        session = self._of_node.get(node_id)
        return session is not None and session.number == number

    def end(self, node_id: str) -> Session | None:
        """The node is not connected by a gateway any more; the session that it had."""
        session = self._of_node.pop(node_id, None)
        if session is not None:
            session.line.sessions.pop(session.number, None)
        return session

    def left(self, number: int) -> str | None:
        """The session is over, as its gateway says; whose it was, if it was its node's still."""
        for line in self.lines.values():
            session = line.sessions.get(number)
            if session is not None:
                self.end(session.node_id)
                return session.node_id
        return None

    def end_line(self, line: Line) -> list[str]:
        """The gateway is gone; the nodes that were connected by it."""
        line.is_over = True
        if self.lines.get(line.gateway_id) is line:
            del self.lines[line.gateway_id]
        nodes = [session.node_id for session in line.sessions.values()]
        for node_id in nodes:
            del self._of_node[node_id]
        line.sessions.clear()
        return nodes

    def push(self, node_id: str, rank: Rank, make: MakePush) -> bool:
        """Says to the node's gateway, behind all else, what is made when its turn comes; False when it has none."""
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        heappush(session.line.pushes, (rank, next(self._pushes), session.number, make))
        return True

    def say(self, node_id: str, kind: Kind, *content: object, num_bytes: int = 0) -> bool:
        """Says it to the node's gateway; False when it has none."""
        session = self._of_node.get(node_id)
        if session is None or session.line.is_over:
            return False
        session.line.put([kind, session.number, *content], num_bytes)
        return True
