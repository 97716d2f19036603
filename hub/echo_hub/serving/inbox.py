"""Events on their way to the coordinator: what nodes say in the order in which it came, all else before it.

What the hub has found out itself completes work that is under way, and there is never more of it than was leased: it
goes first, or verdicts would wait behind all that a full house of nodes sends. Among its own kind, each stays in order.
A verdict cannot overtake its rollout, for it is of one that the coordinator has received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from echo_hub.core.events import (
    Event,
    GroupPrepared,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutsBegun,
    RolloutScored,
)

INBOX_EVENTS: Final = 8_192
"""When so many of what nodes say wait, those who report more wait, down to the nodes' sockets."""
_OF_NODES: Final = frozenset(
    {LeaseGivenBack, NodeConnected, NodeDisconnected, NodeReported, RolloutArrived, RolloutsBegun}
)
_TOGETHER: Final = frozenset({GroupPrepared, NodeReported, RolloutArrived, RolloutsBegun, RolloutScored})
"""What comes by the thousand."""


class Inbox:
    """Belongs to one event loop; one task takes, all others put."""

    def __init__(self) -> None:
        self._first: deque[Event] = deque()
        self._of_nodes: deque[Event] = deque()
        self._there_are = asyncio.Event()
        self._there_are_own = asyncio.Event()
        """That do not come from nodes."""
        self._num_others = 0
        """That are handled alone."""
        self._there_are_others = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = False
        self.num_said = 0
        """Events of nodes that were ever put."""
        self.num_taken = 0
        """Of them, those that were taken."""

    async def put(self, event: Event) -> None:
        """Waits while there are too many. Once nobody takes any more, nothing is kept and nobody waits."""
        if type(event) in _OF_NODES:
            while len(self._of_nodes) >= INBOX_EVENTS and not self._has_ended:
                self._has_room.clear()
                await self._has_room.wait()
            self.num_said += 1
        if not self._has_ended:
            if type(event) in _OF_NODES:
                self._of_nodes.append(event)
            else:
                self._first.append(event)
                self._there_are_own.set()
            if type(event) not in _TOGETHER:
                self._num_others += 1
                self._there_are_others.set()
            self._there_are.set()

    def take(self, most: int = 1, *, of_nodes: bool = True) -> list[Event]:
        """The next one, or as many in a row as may be handled together; none where there is none. Without `of_nodes`
        what nodes say stays where it is."""
        queue = self._first or self._of_nodes
        if not queue:
            self._there_are.clear()
        if not queue or (queue is self._of_nodes and not of_nodes):
            return []
        taken = [queue.popleft()]
        if type(taken[0]) in _TOGETHER:
            while queue and len(taken) < most and type(queue[0]) in _TOGETHER:
                taken.append(queue.popleft())
        else:
            self._num_others -= 1
            if not self._num_others:
                self._there_are_others.clear()
        if queue is self._of_nodes:
            self.num_taken += len(taken)
        elif not queue:
            self._there_are_own.clear()
        if len(self._of_nodes) < INBOX_EVENTS:
            self._has_room.set()
        return taken

    async def wait(self) -> None:
        """Until there is one."""
        await self._there_are.wait()

    async def wait_for_own(self) -> None:
        """Until there is one that does not come from a node."""
        await self._there_are_own.wait()

    async def wait_for_others(self) -> None:
        """Until there is one that is not of a kind that comes by the thousand."""
        await self._there_are_others.wait()

    def __bool__(self) -> bool:
        return bool(self._first or self._of_nodes)

    def end(self) -> None:
        """Nobody takes any more."""
        self._has_ended = True
        self._first.clear()
        self._of_nodes.clear()
        self._has_room.set()
