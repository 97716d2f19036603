"""Login sessions, kept in memory. Each has a random id, which the browser's cookie holds."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

_SECRET_BYTES: Final = 32
LIFE_S: Final = 7 * 86_400.0
MOST: Final = 64
"""Largest number of open sessions. When one more begins, the oldest session ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSession:
    session_id: str
    key: str
    """Secret that the session's forms carry. The browser receives it once, at login, and no page contains it. A
    server on another port of this host sees the session cookie, but never this key."""
    ends_at: float

    def is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogatepass"), self.key.encode())


class BrowserSessions:
    """The open sessions. `now` is a time in seconds, counted from any fixed moment."""

    def __init__(self) -> None:
        self._open: dict[str, BrowserSession] = {}
        """Open sessions by id, oldest first."""

    def begin(self, now: float) -> BrowserSession:
        while len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        session = BrowserSession(
            session_id=secrets.token_urlsafe(_SECRET_BYTES),
            key=secrets.token_urlsafe(_SECRET_BYTES),
            ends_at=now + LIFE_S,
        )
        self._open[session.session_id] = session
        return session

    def find(self, session_id: str, now: float) -> BrowserSession | None:
        session = self._open.get(session_id)
        if session is not None and session.ends_at <= now:
            self.end(session_id)
            return None
        return session

    def end(self, session_id: str) -> None:
        self._open.pop(session_id, None)

    def end_all(self) -> None:
        self._open.clear()
