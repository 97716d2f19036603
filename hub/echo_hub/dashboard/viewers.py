"""Who watches: places for open streams, so that strangers cannot take all that the hub has. Operators need none."""

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
"""So that nobody takes all places; a proxy's viewers have one address unless the hub trusts it."""


class Viewers:
    """Of the public more than `MAX_VIEWERS` at once are sent away, and more than `MAX_VIEWERS_OF_ADDRESS` of one
    address."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._viewers: Counter[str] = Counter()
        """The public's, by what counts as one address."""

    def __len__(self) -> int:
        return self._viewers.total()

    async def admit(
        self, request: web.Request, stream: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What `stream` answers, which may take as long as somebody watches, or why it is not asked."""
        if self._guard.is_operator(request):
            return await stream(request)
        try:
            place = self._guard.visits.place(request)
        except RemoteProtocolError as error:
            return json_response({"error": error.what}, status=400)
        if len(self) >= MAX_VIEWERS or self._viewers[place] >= MAX_VIEWERS_OF_ADDRESS:
            return json_response({"error": "too many viewers; reload the page now and then"}, status=503)
        self._viewers[place] += 1
        try:
            return await stream(request)
        finally:
            self._viewers[place] -= 1
            if not self._viewers[place]:
                del self._viewers[place]
