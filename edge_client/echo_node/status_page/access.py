"""Who may see the status page: whoever shows a code that the node's owner has asked for, once, and then its cookie.

Any user of this machine can reach the port, and any page in a browser can send it requests. So:
- a code is made only for who can read the control file, is good once, and for `CODE_S`;
- it is exchanged for a cookie, which is good for `SESSION_S` and for as long as the process lives;
- browsers send a cookie to every port of a host: this one is for a path that nobody can guess, so that no other
  server of this machine is ever sent it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Final

CODE_S: Final = 60.0
SESSION_S: Final = 12 * 3_600.0
MOST: Final = 16
"""Codes, and sessions: for one more the oldest ends."""
COOKIE: Final = "echo_page"


class Access:
    """`path` begins all of the page's addresses; `invite` makes a code, `enter` takes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self._clock = clock
        self._codes: dict[str, float] = {}
        """When each ends, as below."""
        self._sessions: dict[str, float] = {}

    def invite(self) -> str:
        """A new code."""
        return _add(self._codes, self._clock(), CODE_S)

    def enter(self, code: str) -> str | None:
        """The Set-Cookie header that a code is good for; None: it is none, was used, or is too old."""
        found = _find(self._codes, code, self._clock())
        if found is None:
            return None
        del self._codes[found]
        session = _add(self._sessions, self._clock(), SESSION_S)
        return f"{COOKIE}={session}; Path={self.path}; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict"

    def is_in(self, cookies: str) -> bool:
        """Whether a Cookie header holds a session."""
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _find(self._sessions, cookie.value, self._clock()) is not None


def _add(known: dict[str, float], now: float, length_s: float) -> str:
    if len(known) >= MOST:
        del known[next(iter(known))]
    secret = secrets.token_urlsafe(32)
    known[secret] = now + length_s
    return secret


def _find(known: dict[str, float], given: str, now: float) -> str | None:
    """The secret that was given; in a time that tells nothing of it."""
    found = [secret for secret in known if hmac.compare_digest(secret.encode(), given.encode())]
    return found[0] if found and now < known[found[0]] else None
