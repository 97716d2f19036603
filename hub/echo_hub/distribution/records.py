"""Records of releases (announcements) and arrivals (finished fetches) of versions, in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from echo_hub.dashboard.source import Changes
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store.async_store import AsyncStore


class DistributionRecords:
    """Commits releases and arrivals, then notifies the pages."""

    def __init__(self, store: AsyncStore, changes: Changes) -> None:
        self._store = store
        self._changes = changes

    async def record(self, news: Sequence[Release | Arrival]) -> None:
        """Commit releases and arrivals, in order."""
        await self._store.on_writer(self._store.store.record_distribution, news, time.time())
        self._changes.notify()
