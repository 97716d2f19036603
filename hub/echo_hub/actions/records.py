"""The log of operator actions, and API tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

Scope = Literal["read", "operate", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "operate", "admin")
"""Scopes of operators' tokens in ascending order. Each scope permits everything that the scopes before it permit."""
TokenScope = Literal["read", "operate", "admin", "use"]
"""Scopes of all tokens. A token with the scope `use` gives access only to the interfaces for tenants (the Tinker and
OpenAI APIs). Tokens with other scopes do not."""


def is_good_for(scope: Scope, wanted: Scope) -> bool:
    return SCOPES.index(scope) >= SCOPES.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The author of an action, and the interface through which the request came (page, API, command)."""

    via: Literal["page", "api", "cli"]
    who: str
    """Address of the page's visitor, name of an API token, or user of the hub's computer."""
    scope: Scope = "admin"


class ActionOutcome(StrEnum):
    WANTED = "wanted"
    """The database has the request, but the hub has not carried it out yet."""
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    number: int
    asked_at: float
    """Time of the request. All times in this record are in seconds since the epoch."""
    via: str
    who: str
    action: str
    request: Mapping[str, Any]
    """The action's fields. They never contain a secret."""
    undoes: int | None = None
    """Number of the action that this action reverses. None if it reverses none."""
    outcome: ActionOutcome
    settled_at: float | None = None
    """Time at which the action was done or refused. None until then."""
    before: Any = None
    after: Any = None
    detail: str = ""
    """The result in words, or the reason for the refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """An API token of 256 random bits. The hub stores only its SHA-256."""

    token_id: int
    name: str
    scope: TokenScope
    token_hash: str
    created_at: float
    expires_at: float
    revoked_at: float | None = None

    def holds(self, now: float) -> bool:
        return self.revoked_at is None and now < self.expires_at
