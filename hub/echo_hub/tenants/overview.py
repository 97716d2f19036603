"""Read from the database what tenants have used, and which of their requests failed, for the operator's page."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from echo_hub.store.tenant_overview import read_failed_requests, read_tenants
from echo_hub.tenants.outcomes import Failed
from echo_hub.tenants.quotas import DAY_S, day_of
from echo_hub.tenants.stored import unpack_outcome
from echo_shared.records.tenant import TenantFailure, TenantsOverview

FAILURES_SHOWN: Final = 20


def read_overview(connection: Connection, *, tokens_per_day: int, now: float) -> TenantsOverview:
    """Return all tenants and their newest failed requests. `tokens_per_day` is the run's default quota."""
    tenants = read_tenants(connection, day=day_of(now), now=now, tokens_per_day=tokens_per_day)
    failures = []
    for row in read_failed_requests(connection, since=now - DAY_S, limit=FAILURES_SHOWN):
        outcome = unpack_outcome(row.outcome)
        if isinstance(outcome, Failed):
            failures.append(
                TenantFailure(
                    at=row.ended_at,
                    tenant_id=row.tenant_id,
                    request_id=row.request_id,
                    kind=row.kind,
                    error=outcome.error,
                    category=outcome.category,
                )
            )
    return TenantsOverview(as_of=now, tenants=tuple(tenants), failures=tuple(failures))
