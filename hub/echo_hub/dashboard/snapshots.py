"""Snapshots of the run, shared by all viewers: a thousand viewers cost the hub as much as one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard.model import FleetView, RunView
from echo_hub.dashboard.source import PagesSource

REST: Final = 40.0
"""Rest after computing for the pages, as a multiple of the processor time. Repeated snapshots then use 1/40 of a
core."""
LONGEST_REST_S: Final = 1.5
"""Upper limit of the rest, so that pages stay current on a busy machine."""
LEAST_REST: Final = 9.0
"""Smallest multiple, which overrides `LONGEST_REST_S`: snapshots never use more than a tenth of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run and its nodes at one moment.

    `change` is the newest change that is surely included. `taken_at` and `good_until` are event-loop times; no newer
    snapshot is taken before `good_until`. `took_s` is the time from the request to the result.
    """

    change: int
    taken_at: float
    good_until: float
    took_s: float
    run: RunView
    nodes: FleetView


def rest_s(processor_s: float) -> float:
    """Return the rest after work that used this much processor time.

    Waiting time does not count: on a busy machine, it would make the pages needlessly old.
    """
    return max(min(REST * processor_s, LONGEST_REST_S), LEAST_REST * processor_s)


class Snapshots:
    """Takes snapshots on demand, at most one every `min_interval_s`, fewer if they are expensive.

    With `min_interval_s` 0, every look takes one.
    """

    def __init__(self, source: PagesSource, *, min_interval_s: float) -> None:
        self._source = source
        self._min_interval_s = min_interval_s
        self._lock = asyncio.Lock()
        self._newest: Snapshot | None = None

    async def get(self) -> Snapshot:
        """Return the newest snapshot, or take one if it is older than `min_interval_s` and its rest."""
        async with self._lock:
            newest = self._newest
            if newest is None or asyncio.get_running_loop().time() >= newest.good_until:
                newest = self._newest = await self._take()
            return newest

    async def after(self, seen: int) -> Snapshot:
        """Wait for a snapshot that includes a change above `seen`."""
        while (snapshot := await self.get()).change <= seen:
            await self._source.changes.wait(seen)
            await asyncio.sleep(max(snapshot.good_until - asyncio.get_running_loop().time(), 0.0))
        return snapshot

    async def _take(self) -> Snapshot:
        clock = asyncio.get_running_loop().time
        change, taken_at = self._source.changes.number, clock()
        picture = await self._source.picture()
        now = clock()
        rests_s = rest_s(picture.processor_s) if self._min_interval_s else 0.0
        return Snapshot(
            change=change,
            taken_at=taken_at,
            good_until=max(taken_at + self._min_interval_s, now + rests_s),
            took_s=now - taken_at,
            run=picture.run,
            nodes=picture.nodes,
        )
