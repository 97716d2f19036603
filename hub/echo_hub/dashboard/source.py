"""The interface through which pages read data from the hub and learn about changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from echo_hub.dashboard.model import FleetView, RunView
from echo_shared.records.health import Health
from echo_shared.records.node import NodeRecord
from echo_shared.records.run import EventFilter, RunEvent, StepRecord


class Changes:
    """Announces to waiting tasks that the run has changed, but not what has changed. A task then reads the newest
    state, so it may miss single changes without harm. Use it on one event loop only."""

    def __init__(self) -> None:
        self.number = 0
        """Number of changes announced so far."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Announce a change. This is cheap: call it at every change."""
        self.number += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, seen: int) -> int:
        """Wait until more than `seen` changes were announced, and return their `number`. If the wait is cancelled, no
        announcement is lost.
        """
        while self.number <= seen:
            await self._next.wait()
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    run: RunView
    nodes: FleetView
    processor_s: float
    """Processor time that reading and building `run` and `nodes` took, in seconds."""


class PagesSource(Protocol):
    """Supplies the data that the pages request; the hub implements it. Calls may overlap, and each returns the newest
    state."""

    @property
    def changes(self) -> Changes: ...

    async def run_view(self) -> RunView: ...

    async def picture(self) -> RunPicture: ...

    def health(self) -> Health:
        """Return the hub's health from memory, because a liveness probe must not wait for anything."""
        ...

    async def events(self, wanted: EventFilter, limit: int) -> tuple[RunEvent, ...]: ...

    async def node(self, node_id: str) -> NodeRecord | None:
        """Return a node by its full id; None if no such node ever joined or had a lease."""
        ...

    async def steps(self, since: int) -> tuple[StepRecord, ...]:
        """Return the trained steps after step `since`, in order: all of them, or (if there are more than 1,000) at
        least the first 1,000."""
        ...
