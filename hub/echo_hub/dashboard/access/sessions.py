"""Who is logged in: sessions that only the hub knows of, each under a random id that the browser's cookie holds."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SECRET_BYTES: Final = 32
LIFE_S: Final = 7 * 86_400.0
MOST: Final = 64
"""Sessions at once; with one more the oldest ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One browser's."""

    session_id: str
    form_secret: bytes
    """What its forms carry, masked, and no other site can know."""
    ends_at: float

    def form_token(self) -> str:
        """The secret under a new mask: pages are compressed together with what nodes say of themselves, and the size
        of many pages would give away a text that all of them hold (https://www.breachattack.com)."""
        mask = secrets.token_bytes(_SECRET_BYTES)
        return (mask + _xor(mask, self.form_secret)).hex()

    def is_form_token(self, given: str) -> bool:
        try:
            raw = bytes.fromhex(given)
        except ValueError:
            return False
        mask, masked = raw[:_SECRET_BYTES], raw[_SECRET_BYTES:]
        return len(masked) == _SECRET_BYTES and hmac.compare_digest(_xor(mask, masked), self.form_secret)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


class Sessions:
    """`clock` in seconds, of any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}
        """Oldest first."""

    def begin(self) -> Session:
        while len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        session = Session(
            session_id=secrets.token_urlsafe(_SECRET_BYTES),
            form_secret=secrets.token_bytes(_SECRET_BYTES),
            ends_at=self._clock() + LIFE_S,
        )
        self._open[session.session_id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        session = self._open.get(session_id)
        if session is not None and session.ends_at <= self._clock():
            self.end(session_id)
            return None
        return session

    def end(self, session_id: str) -> None:
        self._open.pop(session_id, None)

    def end_all(self) -> None:
        self._open.clear()
