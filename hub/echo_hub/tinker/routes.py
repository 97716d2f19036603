"""All routes of the Tinker API. An address below the prefixes without a route is answered with 404, like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiohttp import web

from echo_hub.tinker.sampling import RetrievalRoutes, SamplingRoutes
from echo_hub.tinker.sessions import SessionRoutes
from echo_hub.tinker.statuses import AskedFor
from echo_hub.tinker.training import TrainingRoutes
from echo_hub.tinker.weights import FILE_PATH, WeightsRoutes
from echo_hub.tinker.wire import CHECKED_PREFIX, PREFIX, TinkerWire

PREFIXES: Final = (PREFIX, CHECKED_PREFIX)


def routes(wire: TinkerWire) -> Iterator[web.RouteDef]:
    """Yield the routes of both prefixes (of all and of checked completions), and the route of signed URLs."""
    parts = (
        (SessionRoutes(wire), AskedFor.SUBMISSION),
        (TrainingRoutes(wire), AskedFor.SUBMISSION),
        (WeightsRoutes(wire), AskedFor.SUBMISSION),
        (SamplingRoutes(wire), AskedFor.SAMPLE),
        (RetrievalRoutes(wire), AskedFor.RETRIEVAL),
    )
    for part, moment in parts:
        for method, path, handle in part.routes():
            for prefix in PREFIXES:
                yield web.route(method, prefix + path, wire.answering(handle, moment))
        if isinstance(part, WeightsRoutes):
            yield web.get(FILE_PATH, part.file, allow_head=False)
