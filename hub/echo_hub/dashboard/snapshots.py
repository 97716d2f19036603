"""Snapshots of the run. All viewers share one snapshot, so a thousand viewers cost the hub as much as one viewer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard.model import FleetView, RunView
from echo_hub.dashboard.source import PagesSource

REST: Final = 40.0
"""Pause after a snapshot or a rendering, as a multiple of its processor time. So repeated work for the pages normally
takes at most 1/40 of a core.
"""
LONGEST_REST_S: Final = 1.5
"""Longest pause after a snapshot or a rendering, in seconds, so that the pages stay current on a busy machine."""
LEAST_REST: Final = 9.0
"""Shortest pause, as a multiple of the processor time. This minimum overrides `LONGEST_REST_S`, so pages never use more
than a tenth of a core.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The run and its nodes at one moment.

    The snapshot includes every change of the run with a number up to `change` (`Changes.number`). `taken_at` and
    `good_until` are event-loop times; no newer snapshot is taken before `good_until`. `took_s` is the time from the
    request to the result.
    """

    change: int
    taken_at: float
    good_until: float
    took_s: float
    run: RunView
    nodes: FleetView


def rest_s(processor_s: float) -> float:
    """Return the pause in seconds after work that used `processor_s` of processor time.

    Only processor time counts. If waiting counted too, pages on a busy machine would be older than necessary.
    """
    return max(min(REST * processor_s, LONGEST_REST_S), LEAST_REST * processor_s)


class Snapshots:
    """Creates a snapshot of the run when viewers ask for one: at most one in `min_interval_s` seconds, and fewer if a
    snapshot takes much processor time. Viewers in between get the last snapshot.

    If `min_interval_s` is 0, every request creates a new snapshot.
    """

    def __init__(self, source: PagesSource, *, min_interval_s: float) -> None:
        self._source = source
        self._min_interval_s = min_interval_s
        self._lock = asyncio.Lock()
        self._newest: Snapshot | None = None

    async def get(self) -> Snapshot:
        """Return the newest snapshot. After the interval and the pause, take a new snapshot first."""
        async with self._lock:
            newest = self._newest
            if newest is None or asyncio.get_running_loop().time() >= newest.good_until:
                newest = self._newest = await self._take()
            return newest

    async def after(self, seen: int) -> Snapshot:
        """Wait until the run has changed after change number `seen`, and return a snapshot that includes this."""
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
