"""Limits on the number of open event streams, so that strangers cannot use up the hub's connections. Operators have no
limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.responses import json_response
from echo_shared.errors import RemoteProtocolError

MAX_VIEWERS: Final = 2_000
MAX_VIEWERS_OF_ADDRESS: Final = 100
"""Largest number of streams from one address, so that one address cannot use up all streams. All viewers behind an
untrusted proxy share one address.
"""


class Viewers:
    """Admits at most `MAX_VIEWERS` public viewers, at most `MAX_VIEWERS_OF_ADDRESS` from each address."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._viewers: Counter[str] = Counter()
        """Number of open streams of public viewers, by address."""

    def __len__(self) -> int:
        return self._viewers.total()

    @contextmanager
    def admitted(self, request: web.Request) -> Iterator[web.Response | None]:
        """Count the viewer while the block runs. Yield None if the viewer is admitted, else the response that refuses
        the stream."""
        if self._guard.is_operator(request):
            yield None
            return
        try:
            place = self._guard.visits.place(request)
        except RemoteProtocolError as error:
            yield json_response({"error": error.what}, status=400)
            return
        if len(self) >= MAX_VIEWERS or self._viewers[place] >= MAX_VIEWERS_OF_ADDRESS:
            yield json_response({"error": "too many viewers for live updates; reload the page instead"}, status=503)
            return
        self._viewers[place] += 1
        try:
            yield None
        finally:
            self._viewers[place] -= 1
            if not self._viewers[place]:
                del self._viewers[place]
