"""One picture of the run that all viewers share, so that a thousand of them ask the hub no more than one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from echo_hub.dashboard.model import LeaderboardRow, NodeView, PagesSource, RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`change` is the newest change that is surely in it; `taken_at` is the event loop's time."""

    change: int
    taken_at: float
    run: RunView
    nodes: tuple[NodeView, ...]
    leaderboard: tuple[LeaderboardRow, ...]
    _rendered: dict[tuple[str, ...], str] = field(default_factory=dict)

    def rendered(self, key: tuple[str, ...], render: Callable[[], str]) -> str:
        """What `render` makes of this snapshot, made once for all who ask with the same `key`."""
        if key not in self._rendered:
            self._rendered[key] = render()
        return self._rendered[key]


class Snapshots:
    """Takes at most one snapshot every `min_interval_s`, and only when somebody looks."""

    def __init__(self, source: PagesSource, *, min_interval_s: float) -> None:
        self._source = source
        self._min_interval_s = min_interval_s
        self._lock = asyncio.Lock()
        self._newest: Snapshot | None = None

    async def get(self) -> Snapshot:
        """The newest snapshot, at most `min_interval_s` old."""
        async with self._lock:
            newest = self._newest
            if newest is None or asyncio.get_running_loop().time() - newest.taken_at >= self._min_interval_s:
                newest = self._newest = await self._take()
            return newest

    async def after(self, seen: int) -> Snapshot:
        """The newest snapshot, as soon as there is one with a change above `seen`."""
        while (snapshot := await self.get()).change <= seen:
            await self._source.changes.wait(seen)
            age_s = asyncio.get_running_loop().time() - snapshot.taken_at
            await asyncio.sleep(max(self._min_interval_s - age_s, 0.0))
        return snapshot

    async def _take(self) -> Snapshot:
        change, taken_at = self._source.changes.number, asyncio.get_running_loop().time()
        return Snapshot(
            change=change,
            taken_at=taken_at,
            run=await self._source.run_view(),
            nodes=await self._source.nodes(),
            leaderboard=await self._source.leaderboard(),
        )
