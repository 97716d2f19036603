"""The queue of events for the coordinator: first the hub's own events, then the events of nodes, each kind in order.

The hub's own events complete work that is under way. The number of leased rollouts limits their number. They go first,
because otherwise the verdicts of rollouts would wait behind the messages of all nodes. A verdict cannot overtake its
rollout, because only rollouts that the coordinator has received are scored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from echo_hub.core.accounting.events import (
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

QUEUED_EVENTS: Final = 8_192
"""Maximum number of queued events of nodes. While the queue is full, `put` waits, and so the hub stops reading the
nodes' sockets."""
_OF_NODES: Final = frozenset(
    {LeaseGivenBack, NodeConnected, NodeDisconnected, NodeReported, RolloutArrived, RolloutsBegun}
)
_TOGETHER: Final = frozenset({GroupPrepared, NodeReported, RolloutArrived, RolloutsBegun, RolloutScored})
"""Frequent event types. `take` returns several of them at a time; all other events are handled alone."""


class EventQueue:
    """Queue of one event loop. Every part of the hub puts events; the driver alone takes them."""

    def __init__(self) -> None:
        self._first: deque[Event] = deque()
        self._of_nodes: deque[Event] = deque()
        self._there_are = asyncio.Event()
        self._there_are_own = asyncio.Event()
        """Set while the hub's own events wait."""
        self._num_others = 0
        """Number of queued events of rare types, which are handled alone."""
        self._there_are_others = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = False
        self.num_put = 0
        """Number of nodes' events put since the start."""
        self.num_taken = 0
        """Number of nodes' events taken since the start."""

    async def put(self, event: Event) -> None:
        """Add an event. A node's event waits while QUEUED_EVENTS events of nodes are queued. After `end`, every event
        is dropped at once."""
        if type(event) in _OF_NODES:
            while len(self._of_nodes) >= QUEUED_EVENTS and not self._has_ended:
                self._has_room.clear()
                await self._has_room.wait()
            self.num_put += 1
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
        """Return the next event, or up to `most` frequent events in a row; [] if there is none. The hub's own events
        come first; without `of_nodes`, nodes' events stay in the queue."""
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
        if len(self._of_nodes) < QUEUED_EVENTS:
            self._has_room.set()
        return taken

    async def wait(self) -> None:
        """Wait until the queue holds an event. Also return if it held one since `take` last returned []."""
        await self._there_are.wait()

    async def wait_for_own(self) -> None:
        """Wait until the queue holds an event of the hub itself."""
        await self._there_are_own.wait()

    async def wait_for_others(self) -> None:
        """Wait until the queue holds an event that is handled alone."""
        await self._there_are_others.wait()

    def __bool__(self) -> bool:
        return bool(self._first or self._of_nodes)

    def end(self) -> None:
        """End the queue because the driver has ended: drop all events, also those that are put later."""
        self._has_ended = True
        self._first.clear()
        self._of_nodes.clear()
        self._has_room.set()
