"""Limits on open event streams, so that strangers cannot use up the hub's connections. Operators are not limited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.responses import json_response
from echo_shared.errors import RemoteProtocolError

MAX_VIEWERS: Final = 2_000
MAX_VIEWERS_OF_ADDRESS: Final = 100
"""Largest number of streams from one address, so that one address cannot take all places. Viewers behind a proxy share
an address unless the hub trusts the proxy.
"""


class Viewers:
    """Admits at most `MAX_VIEWERS` public viewers, and `MAX_VIEWERS_OF_ADDRESS` from one address."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._viewers: Counter[str] = Counter()
        """Open streams of public viewers by address key."""

    def __len__(self) -> int:
        return self._viewers.total()

    async def admit(
        self, request: web.Request, stream: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Run `stream` until the viewer leaves, or answer why the viewer is not admitted."""
        if self._guard.is_operator(request):
            return await stream(request)
        try:
            place = self._guard.visits.place(request)
        except RemoteProtocolError as error:
            return json_response({"error": error.what}, status=400)
        if len(self) >= MAX_VIEWERS or self._viewers[place] >= MAX_VIEWERS_OF_ADDRESS:
            return json_response({"error": "too many viewers for live updates; reload the page instead"}, status=503)
        self._viewers[place] += 1
        try:
            return await stream(request)
        finally:
            self._viewers[place] -= 1
            if not self._viewers[place]:
                del self._viewers[place]
