"""API tokens for scripts, each with a scope and an expiry. The hub stores only their SHA-256.

A token holds 256 random bits, so a fast hash protects it as well as a slow one. The hub looks tokens up by their hash,
so the time of a lookup reveals nothing about a token.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from echo_hub.actions.records import ApiToken

PREFIX: Final = "echo_"
"""Prefix of each token, by which people and secret scanners recognise it."""
MOST_CHARACTERS: Final = 128


def new_api_token() -> str:
    """Return a new random token. Its owner sees it only once, when it is made."""
    return f"{PREFIX}{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    """Return the token's hash, which is all that the hub stores."""
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class ApiTokens:
    """All API tokens of the database, kept in memory, so that requests need no query."""

    def __init__(self) -> None:
        self._by_hash: dict[str, ApiToken] = {}

    def renew(self, tokens: Iterable[ApiToken]) -> None:
        self._by_hash = {token.token_hash: token for token in tokens}

    def find(self, given: str, now: float) -> ApiToken | None:
        """Return the token's record if it is valid at `now` (seconds since the epoch), else None."""
        if not given.startswith(PREFIX) or len(given) > MOST_CHARACTERS:
            return None
        token = self._by_hash.get(hash_of(given))
        return token if token is not None and token.holds(now) else None

    def is_tenant(self, name: str, now: float) -> bool:
        """Return True if a token of this name with the scope `use` is valid at `now`."""
        return any(token.name == name and token.scope == "use" and token.holds(now) for token in self._by_hash.values())
