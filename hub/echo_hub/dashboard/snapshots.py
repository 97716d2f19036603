"""One picture of the run that all viewers share, so that a thousand of them ask the hub no more than one does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard.model import Fleet, RunView
from echo_hub.dashboard.source import PagesSource

REST: Final = 40.0
"""Times what was computed for the pages: looking again and again then takes a fortieth of a processor."""
LONGEST_REST_S: Final = 1.5
"""But no more, so that pages are of now also where the machine is busy with something else ..."""
LEAST_REST: Final = 9.0
"""... unless it would take more than a tenth of a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`change` is the newest change that is surely in it; `taken_at` is the event loop's time, and so is `good_until`,
    up to which nobody sees another; `took_s` is from when it was wanted to when it was there."""

    change: int
    taken_at: float
    good_until: float
    took_s: float
    run: RunView
    nodes: Fleet


def rest_s(processor_s: float) -> float:
    """How long nothing is done for the pages after what took so much of the processor. What was waited for is no
    measure: on a machine that is busy with something else pages would be the older for it."""
    return max(min(REST * processor_s, LONGEST_REST_S), LEAST_REST * processor_s)


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
