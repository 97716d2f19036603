"""The address of a tenant's request, and how the request's connection counts in the limits."""

from __future__ import annotations

from aiohttp import web

from echo_hub.dashboard.access.guard import Visits
from echo_hub.net.limits import ConnectionLimits


class TenantVisits:
    """Implements `echo_hub.tenants.access.Visitors` for the hub's port."""

    def __init__(self, visits: Visits, limits: ConnectionLimits) -> None:
        self._visits = visits
        self._limits = limits

    def place(self, request: web.Request) -> str:
        return self._visits.place(request)

    def vouch(self, request: web.Request, tenant_id: str) -> None:
        self._limits.vouch_tenant(request, tenant_id)
