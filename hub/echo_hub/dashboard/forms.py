"""Forms on pages that all operators see in one rendering: each session's own token is put in when it is sent."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from aiohttp import web

from echo_hub.dashboard.access.guard import Guard


class FormTokens:
    """`slot` stands in a rendering for the token of whoever looks, and nobody can know it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.slot = secrets.token_hex()

    def personal(self, request: web.Request) -> Callable[[str], str]:
        """Puts the viewer's own token into a page or a part of it; of a script, which needs no forms, there is none."""
        session = self._guard.session(request)
        return lambda text: text.replace(self.slot, session.form_token() if session else "")
