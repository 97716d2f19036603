"""The log of operator actions, and API tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

Scope = Literal["read", "operate", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "operate", "admin")
"""In ascending order; each scope includes those before it."""


def is_good_for(scope: Scope, wanted: Scope) -> bool:
    return SCOPES.index(scope) >= SCOPES.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The author of an action, and the interface that was used."""

    via: Literal["page", "api", "cli"]
    who: str
    """The address of the page's visitor, a token's name, or a user of the hub's computer."""
    scope: Scope = "admin"


class ActionOutcome(StrEnum):
    """The outcome of an action."""

    WANTED = "wanted"
    """Stored in the database, but not carried out yet."""
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """One entry of the action log."""

    number: int
    asked_at: float
    """Seconds since the epoch, like all times here."""
    via: str
    who: str
    action: str
    request: Mapping[str, Any]
    """The action's fields; never a secret."""
    undoes: int | None = None
    """Number of the action that this one undoes."""
    outcome: ActionOutcome
    settled_at: float | None = None
    """Time when it was done or refused."""
    before: Any = None
    after: Any = None
    detail: str = ""
    """The result, or the reason for the refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """An API token: 256 random bits, of which the hub keeps only the SHA-256."""

    token_id: int
    name: str
    scope: Scope
    token_hash: str
    created_at: float
    expires_at: float
    revoked_at: float | None = None

    def holds(self, now: float) -> bool:
        return self.revoked_at is None and now < self.expires_at
