"""One picture of the run that all viewers share, so that a thousand of them ask the hub no more than one does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard.model import NodeView, PagesSource, RunView

REST: Final = 40.0
"""Times what was done for the pages: looking again and again then takes a fortieth of the hub's time."""
LONGEST_REST_S: Final = 1.5
"""But no more, so that pages are of now also where the machine is busy with something else ..."""
LEAST_REST: Final = 9.0
"""... unless it would take more than a tenth of the hub's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`change` is the newest change that is surely in it; `taken_at` is the event loop's time, and so is `good_until`,
    up to which nobody sees another; `took_s` is what it took to take."""

    change: int
    taken_at: float
    good_until: float
    took_s: float
    run: RunView
    nodes: tuple[NodeView, ...]


def rest_s(took_s: float) -> float:
    """How long nothing is done for the pages after what took so long."""
    return max(min(REST * took_s, LONGEST_REST_S), LEAST_REST * took_s)


class Snapshots:
    """Takes at most one snapshot every `min_interval_s`, seldomer where it takes long, and only when somebody looks;
    with 0 one for each look."""

    def __init__(self, source: PagesSource, *, min_interval_s: float) -> None:
        self._source = source
        self._min_interval_s = min_interval_s
        self._lock = asyncio.Lock()
        self._newest: Snapshot | None = None

    async def get(self) -> Snapshot:
        """The newest snapshot, at most `min_interval_s` old, or `rest_s` of what it took."""
        async with self._lock:
            newest = self._newest
            if newest is None or asyncio.get_running_loop().time() >= newest.good_until:
                newest = self._newest = await self._take()
            return newest

    async def after(self, seen: int) -> Snapshot:
        """The newest snapshot, as soon as there is one with a change above `seen`."""
        while (snapshot := await self.get()).change <= seen:
            await self._source.changes.wait(seen)
            await asyncio.sleep(max(snapshot.good_until - asyncio.get_running_loop().time(), 0.0))
        return snapshot

    async def _take(self) -> Snapshot:
        clock = asyncio.get_running_loop().time
        change, taken_at = self._source.changes.number, clock()
        run, nodes = await self._source.run_view(), await self._source.nodes()
        now = clock()
        took_s = now - taken_at
        rests_s = rest_s(took_s) if self._min_interval_s else 0.0
        return Snapshot(
            change=change,
            taken_at=taken_at,
            good_until=max(taken_at + self._min_interval_s, now + rests_s),
            took_s=took_s,
            run=run,
            nodes=nodes,
        )
