"""What tenants use, and the limits that operators have set for single tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from echo_hub.store.tables import api_tokens
from echo_hub.store.tenant_records import FAILED, WAITING
from echo_hub.store.tenant_tables import (
    tenant_checkpoints,
    tenant_limits,
    tenant_models,
    tenant_requests,
    tenant_sessions,
    tenant_tallies,
)
from echo_shared.records.tenant import TenantTotals

USE: Final = "use"
"""Scope of the API tokens that let their owners train and sample through the hub as tenants."""
DAYS: Final = 30
"""Number of days, today included, over which a tenant's tokens are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLimits:
    """Limits that operators have set for one tenant."""

    tokens_per_day: int | None = None
    """The tenant's quota of tokens a day; None = the run's setting applies."""
    blocked_at: float | None = None


def read_tenant_limits(connection: Connection) -> dict[str, OwnLimits]:
    """Return the limits of the tenants about which operators have decided, by tenant."""
    return {
        row.tenant_id: OwnLimits(tokens_per_day=row.tokens_per_day, blocked_at=row.blocked_at)
        for row in connection.execute(select(tenant_limits))
    }


def has_been_tenant(connection: Connection, tenant_id: str) -> bool:
    """Return True if an API token with this name and the scope `use` was ever made."""
    of_it = (api_tokens.c.name == tenant_id, api_tokens.c.scope == USE)
    return connection.execute(select(api_tokens.c.token_id).where(*of_it)).first() is not None


def set_tenant_limits(connection: Connection, tenant_id: str, limits: OwnLimits) -> None:
    """Store the limits that operators have decided for a tenant."""
    of_it = tenant_limits.c.tenant_id == tenant_id
    given = {"tokens_per_day": limits.tokens_per_day, "blocked_at": limits.blocked_at}
    if limits == OwnLimits():
        connection.execute(delete(tenant_limits).where(of_it))
    elif connection.execute(update(tenant_limits).where(of_it).values(given)).rowcount == 0:
        connection.execute(insert(tenant_limits), {"tenant_id": tenant_id, **given})


def read_tenants(connection: Connection, *, day: int, now: float, tokens_per_day: int) -> list[TenantTotals]:
    """Return the tenants by name: owners of tokens, and users of the hub in the last `DAYS` days.

    `day` is the number of today (days since the epoch, UTC). `tokens_per_day` is the run's setting.
    """
    tokens = _by_name(connection, _valid_tokens(now))
    limits, recent, today = read_tenant_limits(connection), Counter[str](), {}
    for row in connection.execute(select(tenant_tallies).where(tenant_tallies.c.day.between(day - DAYS + 1, day))):
        recent[row.tenant_id] += row.prompt_tokens + row.drawn_tokens + row.trained_tokens
        if row.day == day:
            today[row.tenant_id] = row
    names = sorted(tokens.keys() | recent.keys() | limits.keys())
    live = tenant_sessions.c.ended_at.is_(None)
    sessions = _by_name(connection, _count(tenant_sessions.c.tenant_id).where(live))
    of_live = tenant_models.c.session_id.in_(select(tenant_sessions.c.session_id).where(live))
    models = _by_name(connection, _count(tenant_models.c.tenant_id).where(of_live))
    queued = _by_name(connection, _count(tenant_requests.c.tenant_id).where(tenant_requests.c.state == WAITING))
    saved = _by_name(connection, _saved_bytes(names))
    found = []
    for name in names:
        own, used = limits.get(name, OwnLimits()), today.get(name)
        found.append(
            TenantTotals(
                tenant_id=name,
                token_expires_at=tokens.get(name),
                blocked_at=own.blocked_at,
                sessions=sessions.get(name, 0),
                models=models.get(name, 0),
                queued=queued.get(name, 0),
                requests_today=used.requests if used else 0,
                prompt_tokens_today=used.prompt_tokens if used else 0,
                drawn_tokens_today=used.drawn_tokens if used else 0,
                trained_tokens_today=used.trained_tokens if used else 0,
                recent_tokens=recent[name],
                tokens_per_day=tokens_per_day if own.tokens_per_day is None else own.tokens_per_day,
                has_own_quota=own.tokens_per_day is not None,
                saved_bytes=saved.get(name, 0),
            )
        )
    return found


def read_failed_requests(connection: Connection, *, since: float, limit: int) -> list[Row[Any]]:
    """Return (request_id, tenant_id, kind, ended_at, outcome) of the newest requests that failed after `since` and
    whose outcomes are still kept, newest first."""
    columns = (tenant_requests.c[name] for name in ("request_id", "tenant_id", "kind", "ended_at", "outcome"))
    kept = (tenant_requests.c.outcome.is_not(None), tenant_requests.c.ended_at > since)
    failed = select(*columns).where(*kept, tenant_requests.c.state == FAILED)
    return list(connection.execute(failed.order_by(tenant_requests.c.ended_at.desc()).limit(limit)))


def _by_name(connection: Connection, query: Select[Any]) -> dict[str, Any]:
    found: Mapping[str, Any] = {row[0]: row[1] for row in connection.execute(query)}
    return dict(found)


def _count(tenant: Any) -> Select[Any]:
    return select(tenant, func.count()).group_by(tenant)


def _valid_tokens(now: float) -> Select[Any]:
    """Select each tenant with the latest expiry of its valid tokens; None if no token of the tenant is valid."""
    is_valid = api_tokens.c.revoked_at.is_(None) & (api_tokens.c.expires_at > now)
    valid = func.max(api_tokens.c.expires_at).filter(is_valid)
    return select(api_tokens.c.name, valid).where(api_tokens.c.scope == USE).group_by(api_tokens.c.name)


def _saved_bytes(names: Sequence[str]) -> Select[Any]:
    columns = tenant_checkpoints.c
    of_them = select(columns.tenant_id, func.sum(columns.size_bytes)).where(columns.tenant_id.in_(names))
    return of_them.group_by(columns.tenant_id)
