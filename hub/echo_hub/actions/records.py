"""Who did what, and what came of it: the log of actions, and the tokens of scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

Scope = Literal["read", "operate", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("read", "operate", "admin")
"""Each is good for what those before it are, too."""


def is_good_for(scope: Scope, wanted: Scope) -> bool:
    return SCOPES.index(scope) >= SCOPES.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who wants something done, and by which door."""

    via: Literal["page", "api", "cli"]
    who: str
    """The address that a page was opened from, a token's name, or a user of the hub's computer."""
    scope: Scope = "admin"


class Outcome(StrEnum):
    """What has become of an action."""

    WANTED = "wanted"
    """It is in the books, and the hub has not done it yet."""
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """One row of the log."""

    number: int
    asked_at: float
    """Seconds since the epoch, as all times here."""
    via: str
    who: str
    action: str
    request: Mapping[str, Any]
    """Its fields; never a secret."""
    undoes: int | None = None
    """The number of the action that this one takes back."""
    outcome: Outcome
    settled_at: float | None = None
    """When it was done or refused."""
    before: Any = None
    after: Any = None
    detail: str = ""
    """What came of it, or why it was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """A script's token: 256 random bits, of which the hub keeps a SHA-256."""

    token_id: int
    name: str
    scope: Scope
    token_hash: str
    created_at: float
    expires_at: float
    revoked_at: float | None = None

    def holds(self, now: float) -> bool:
        return self.revoked_at is None and now < self.expires_at
