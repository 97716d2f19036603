"""Apply what operators decide about single tenants: quotas, blocks and revoked tokens. Commands in other processes may
write these decisions to the database, so the hub reads them each second."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final, Protocol

from echo_hub.store.async_store import AsyncStore
from echo_hub.store.tenant_overview import OwnLimits, read_tenant_limits
from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.quotas import Quotas, TenantLimits

LOOK_S: Final = 1.0
"""Seconds between two readings of the operators' decisions."""


class TenantSamples(Protocol):
    """Access to the samples that are being drawn for tenants. Implemented by
    `echo_hub.tenants.service.TenantService`."""

    @property
    def quotas(self) -> Quotas: ...

    def drawing_tenants(self) -> set[str]: ...

    async def stop_drawing(self, tenant_id: str) -> None: ...


class OwnLimitsWatch:
    """Passes operators' decisions to the access check and the quotas, and stops the samples of tenants that lost their
    access."""

    def __init__(
        self, store: AsyncStore, limits: TenantLimits, *, access: TenantAccess, samples: TenantSamples
    ) -> None:
        """`limits` apply to tenants for which operators have set none."""
        self._store = store
        self._limits = limits
        self._access = access
        self._quotas = samples.quotas
        self._samples = samples
        self._known: dict[str, OwnLimits] = {}

    async def look(self) -> None:
        """Read the operators' decisions once, and apply them. Call it before the first request is admitted."""
        found = await self._store.read(read_tenant_limits)
        if found == self._known:
            return
        self._known = found
        self._access.blocked = frozenset(name for name, own in found.items() if own.blocked_at is not None)
        self._quotas.change(
            {
                name: replace(self._limits, tokens_per_day=own.tokens_per_day)
                for name, own in found.items()
                if own.tokens_per_day is not None
            }
        )

    async def run(self) -> None:
        """Read and apply the decisions each `LOOK_S` seconds, until cancelled."""
        while True:
            await self.look()
            await self.stop_unserved()
            await asyncio.sleep(LOOK_S)

    async def stop_unserved(self) -> None:
        """Stop the samples of tenants that are blocked, or whose last token is no longer valid."""
        for tenant_id in self._samples.drawing_tenants():
            if not self._access.serves(tenant_id):
                await self._samples.stop_drawing(tenant_id)
