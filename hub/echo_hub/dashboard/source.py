"""What the pages ask the hub for: the protocol of whoever answers, and how they learn that something has changed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from echo_hub.dashboard.model import Fleet, RunView
from echo_shared.books import EventFilter, RunEvent, StepRecord
from echo_shared.health import Health
from echo_shared.node_books import NodeRecord


class Changes:
    """Says that something changed, never what: who waits then reads the newest state, so a missed change is harmless.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.number = 0
        """How many changes there were."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Says that something has changed. Cheap: call it at every change."""
        self.number += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, seen: int) -> int:
        """Returns `number` once it is above `seen`. Cancel-safe."""
        while self.number <= seen:
            await self._next.wait()
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The run and its nodes at one moment."""

    run: RunView
    nodes: Fleet
    processor_s: float
    """What it took of the processor."""


class PagesSource(Protocol):
    """What the hub supplies to the pages. Reads may overlap; each returns the newest state that is there."""

    @property
    def changes(self) -> Changes: ...

    async def run_view(self) -> RunView: ...

    async def picture(self) -> Picture: ...

    def health(self) -> Health:
        """From memory: whoever asks whether the hub is alive waits for nothing else."""
        ...

    async def events(self, wanted: EventFilter, limit: int) -> tuple[RunEvent, ...]:
        """At most `limit` of the events that fit, the newest first."""
        ...

    async def node(self, node_id: str) -> NodeRecord | None:
        """By its whole id; None: no node of this id ever joined or was leased to."""
        ...

    async def steps(self, since: int) -> tuple[StepRecord, ...]:
        """The trained steps after step `since`, in order; where there are many, at least the first 1,000."""
        ...
