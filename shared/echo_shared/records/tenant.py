"""Figures of tenants, the owners of API tokens with the scope `use`, as the operator's page and command show them.

Field names are those of the JSON of /api/v1/tenants, so renaming one breaks clients. Times are seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTotals:
    """One tenant: its current use, its use today (UTC) and in the last 30 days, and its quota."""

    ALSO_IN_JSON: ClassVar = ("tokens_today",)

    tenant_id: str
    """The tenant's id: the name of its API token."""
    token_expires_at: float | None
    """Time at which the tenant's API token expires; None if no token of this name is valid."""
    blocked_at: float | None = None
    sessions: int = 0
    """Open sessions."""
    models: int = 0
    """Models in training."""
    queued: int = 0
    """Requests that wait or are being processed."""
    requests_today: int = 0
    prompt_tokens_today: int = 0
    drawn_tokens_today: int = 0
    trained_tokens_today: int = 0
    recent_tokens: int = 0
    """Tokens of the last 30 days: prompts, drawn and trained tokens."""
    tokens_per_day: int = 0
    """The tenant's quota in tokens per day; 0 = no limit."""
    has_own_quota: bool = False
    """True if an operator has set this tenant's quota. False if the run's setting applies."""
    saved_bytes: int = 0
    """Disk space of the tenant's saved weights."""

    @property
    def tokens_today(self) -> int:
        return self.prompt_tokens_today + self.drawn_tokens_today + self.trained_tokens_today


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFailure:
    """A tenant's request that failed."""

    at: float
    tenant_id: str
    request_id: str
    kind: str
    error: str
    category: str
    """`user`, `server` or `unknown`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsOverview:
    as_of: float
    tenants: tuple[TenantTotals, ...]
    failures: tuple[TenantFailure, ...] = ()
    """The newest failed requests whose errors are still kept, newest first."""
