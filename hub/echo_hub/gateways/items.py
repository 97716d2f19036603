"""Items that gateways and hub exchange: short lists of plain values. Items with messages from or to nodes contain the
frames of the nodes' own connections.

  stored:  [gateway, number, [item, …]]    ROLLOUT, SAID, LEFT: in the order of the nodes' messages
  asked:   [gateway, epoch, number, item]  HERE, MEET, JOIN, GONE
  told:    [epoch, number, [item, …]]      HERE, MET, JOINED, REFUSED, SEND, PUSH, PART, CLOSE
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any, Final

Item = list[Any]
"""An `ItemKind`, then the fields that its docstring lists."""

AROUND_BYTES: Final = 128
"""Estimated number of bytes that an item takes in addition to its frame."""


class ItemKind(IntEnum):
    ROLLOUT = 0
    """Fields: node, session, frame, rollout id."""
    SAID = 1
    """Fields: node, session, frame of any other message from the node."""
    LEFT = 2
    """Fields: node, session. The connection of this session has ended."""
    HERE = 3
    """No fields. Heartbeat of a gateway or the hub."""
    MEET = 4
    """Fields: request, node, invite token, nonce. Asks what the hub knows about this authenticated node."""
    MET = 5
    """Fields: request, invite id or None, True if the node is known, why the node's invite has ended or None. Answers
    MEET."""
    JOIN = 6
    """Fields: request, NodeInfo as a dict. The node asks to join."""
    JOINED = 7
    """Fields: request, session, encoded Welcome. Answers JOIN."""
    REFUSED = 8
    """Fields: request, code, what, got, do. Refuses a MEET or JOIN."""
    SEND = 9
    """Fields: session, frame. A message to the node."""
    PUSH = 10
    """Fields: session, frame, rank. A low-priority message to the node."""
    PART = 11
    """Fields: session, code, what. Close this node's connection."""
    CLOSE = 12
    """Fields: code, what. Close all connections."""
    GONE = 13
    """No fields. The gateway and all its connections have ended."""


class ItemQueue:
    """Items that wait to be sent, and the estimated number of their bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._items: deque[tuple[Item, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, frame_bytes: int = 0) -> None:
        """Append an item. `frame_bytes` is the size of the frame in the item."""
        self._items.append((item, frame_bytes + AROUND_BYTES))
        self.num_bytes += frame_bytes + AROUND_BYTES

    def take(self, most_bytes: int) -> list[Item]:
        """Remove and return the first items, up to `most_bytes` bytes in total. The first item is returned even if it
        is larger."""
        taken, rest = list[Item](), most_bytes
        while self._items and (not taken or self._items[0][1] <= rest):
            item, num_bytes = self._items.popleft()
            taken.append(item)
            rest -= num_bytes
            self.num_bytes -= num_bytes
        return taken
