"""The tenants' figures for the operator's page, read from the database on a thread."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from echo_hub.store.store import Store
from echo_hub.tenants.overview import read_overview
from echo_shared.records.tenant import TenantsOverview


class TenantPages:
    """Implements `echo_hub.dashboard.tenants_page.TenantsSource`."""

    def __init__(self, store: Store, *, tokens_per_day: int) -> None:
        """`tokens_per_day` is the quota in the run's settings."""
        self._store = store
        self._tokens_per_day = tokens_per_day

    async def overview(self) -> TenantsOverview:
        read = partial(read_overview, tokens_per_day=self._tokens_per_day, now=time.time())
        return await asyncio.to_thread(self._store.read, read)
