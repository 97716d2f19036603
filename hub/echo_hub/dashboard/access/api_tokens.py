"""Tokens of scripts: each for a scope and a time, known to the hub by its SHA-256 alone.

They are 256 random bits, so a fast hash keeps them as well as a slow one would, and what is looked up by a hash tells
nobody's clock anything of the token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final

from echo_hub.actions.records import ApiToken

PREFIX: Final = "echo_"
"""By which people and scanners of repositories know one."""
MOST_CHARACTERS: Final = 128


def new_api_token() -> str:
    """What a script is given, once."""
    return f"{PREFIX}{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    """What the hub keeps of it."""
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class ApiTokens:
    """Those in the books, in memory, so that no request costs a look into the store. `clock`: seconds since the
    epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._by_hash: dict[str, ApiToken] = {}

    def renew(self, tokens: Iterable[ApiToken]) -> None:
        """These are all that there are."""
        self._by_hash = {token.token_hash: token for token in tokens}

    def find(self, given: str) -> ApiToken | None:
        """The token that this is, if it is good now."""
        if not given.startswith(PREFIX) or len(given) > MOST_CHARACTERS:
            return None
        token = self._by_hash.get(hash_of(given))
        return token if token is not None and token.holds(self._clock()) else None
