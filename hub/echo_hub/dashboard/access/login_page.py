"""Login and logout: /login asks for the token or the password, /logout ends the session."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import lru_cache
from math import ceil
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.dashboard.access.credentials import BusyError
from echo_hub.dashboard.access.guard import NOT_OWN_PAGE, Guard
from echo_hub.dashboard.responses import plain_html_response
from echo_hub.dashboard.templating import Template
from echo_shared.errors import RemoteProtocolError

log = logging.getLogger(__name__)

MOST_BYTES: Final = 8_192
"""Largest accepted login form, in bytes. The limit is needed because anyone may send one."""
BODY_S: Final = 10.0
"""Seconds within which a login form must be received."""
PAGES_KEPT: Final = 256
"""Number of rendered login pages kept in memory. Clients that guess passwords request these pages hundreds of times a
second, in few variants.
"""


class LoginPage:
    def __init__(self, guard: Guard, attempts: Attempts, templates: jinja2.Environment) -> None:
        self._guard = guard
        self._attempts = attempts
        self._template = Template(templates, "login.html")
        self._rendered = lru_cache(PAGES_KEPT)(self._render)

    async def serve(self, request: web.Request) -> web.Response:
        """GET /login. Logged-in users get the page too: if a browser has lost its session's key, a new login gives it a
        new one."""
        return self._page()

    async def log_in(self, request: web.Request) -> web.Response:
        """POST /login"""
        if not self._guard.is_from_own_page(request):
            return self._page(NOT_OWN_PAGE, status=403)
        try:
            place, given = self._guard.visits.place(request), await _secret_of(request)
        except (RemoteProtocolError, TimeoutError, ValueError):
            return self._page("This form cannot be read.", status=400)
        if self._guard.credentials.is_token(given.strip()):
            return self._guard.begin_session(request)
        if wait_s := self._attempts.wait_s(place, time.monotonic()):
            page = self._page(f"Too many attempts: try again in {ceil(wait_s)} seconds.", status=429)
            page.headers["Retry-After"] = str(ceil(wait_s))
            return page
        try:
            is_password = await self._guard.credentials.is_password(given)
        except BusyError:
            return self._page("Too many logins at this moment: try again.", status=503)
        if not is_password:
            log.warning("a login from %s was refused", place, extra={"event": "login_refused", "subject": place})
            return self._page("This is neither the token nor the password.", status=403)
        self._attempts.forget(place)
        return self._guard.begin_session(request)

    async def log_out(self, request: web.Request) -> web.Response:
        """POST /logout"""
        return self._guard.end_session(request)

    def _page(self, refusal: str = "", *, status: int = 200) -> web.Response:
        return plain_html_response(self._rendered(refusal, self._guard.credentials.has_password), status=status)

    def _render(self, refusal: str, has_password: bool) -> bytes:
        return self._template.render(room="login", refusal=refusal, has_password=has_password).encode()


async def _secret_of(request: web.Request) -> str:
    """Return the secret in a login form. Raises ValueError for any other form, and TimeoutError if the form arrives too
    slowly.
    """
    length = request.content_length
    if request.content_type != "application/x-www-form-urlencoded" or length is None or length > MOST_BYTES:
        raise ValueError("no form of this page")
    async with asyncio.timeout(BODY_S):
        given = (await request.post()).get("secret", "")
    return given if isinstance(given, str) else ""
