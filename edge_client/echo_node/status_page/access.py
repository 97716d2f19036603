"""Access to the status page: a one-time code, which the node's owner requests, is exchanged for a cookie.

Any user of this machine can reach the port, and any web page can send requests to it. Therefore:
- a code is given only to a program that can read the control file, works once, and expires after `CODE_S` seconds;
- it is exchanged for a cookie, which is valid for `SESSION_S` seconds, or until the process ends;
- the cookie's path cannot be guessed: browsers send cookies to every port of a host, so other local servers could
  otherwise receive this cookie.
"""

from __future__ import annotations

import hmac
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from typing import Final

CODE_S: Final = 60.0
SESSION_S: Final = 12 * 3_600.0
MOST: Final = 16
"""Maximum number of one-time codes, and of browser sessions, at the same time. One more ends the oldest."""
COOKIE: Final = "echo_page"


class PageAccess:
    """Codes and sessions of the page. All addresses of the page start with `path`. `invite` makes a code, `enter` uses
    it.
    """

    def __init__(self) -> None:
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self._codes: dict[str, float] = {}
        """Expiry time of each code. `_sessions` holds the expiry time of each session."""
        self._sessions: dict[str, float] = {}

    def invite(self) -> str:
        return _add(self._codes, time.monotonic(), CODE_S)

    def enter(self, code: str) -> str | None:
        """Exchange a code for a Set-Cookie header; None if the code is unknown, used, or expired."""
        found = _find(self._codes, code, time.monotonic())
        if found is None:
            return None
        del self._codes[found]
        session = _add(self._sessions, time.monotonic(), SESSION_S)
        return f"{COOKIE}={session}; Path={self.path}; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict"

    def is_in(self, cookies: str) -> bool:
        """Return True if a Cookie header holds a valid session."""
        try:
            cookie = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _find(self._sessions, cookie.value, time.monotonic()) is not None


def _add(known: dict[str, float], now: float, length_s: float) -> str:
    if len(known) >= MOST:
        del known[next(iter(known))]
    secret = secrets.token_urlsafe(32)
    known[secret] = now + length_s
    return secret


def _find(known: dict[str, float], given: str, now: float) -> str | None:
    """Return the matching secret, unless it has expired. The duration of the comparison reveals nothing about it."""
    found = [secret for secret in known if hmac.compare_digest(secret.encode(), given.encode())]
    return found[0] if found and now < known[found[0]] else None
