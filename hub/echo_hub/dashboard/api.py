"""The machine-readable room, /api/v1/: the views of `model` as JSON, and a stream that says when to read them again.

GET /api/v1/run             one object: `RunView`
GET /api/v1/nodes           {"nodes": [`NodeView`, ...]}
GET /api/v1/steps?since=N   {"steps": [`StepRecord`, ...]}, the first 1,000 steps after N in order; N is 0 if left out.
                            Full answers have a sequel: ask again with N = the last step, until one has fewer
GET /api/v1/curves          {"width": W, "points": [...]}, all steps in 600 points at most: see `curves`
GET /api/v1/leaderboard     {"leaderboard": [`LeaderboardRow`, ...]}, in rank order
GET /api/v1/events          server-sent `changed` {"state", "trained_step", "published_version"}, comments between
GET /healthz                {"status": "ok"} as soon as the hub serves, whatever else it does: it is live
GET /readyz                 {"status": "starting" | "ready" | "failing", "problems": [text, ...], "detail": text}:
                            200 when it is ready to train, 503 while it starts or something is broken

Fields are only ever added. Answers are a moment old at most; a `changed` is never ahead of the answers that follow it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from aiohttp import web
from aiohttp_sse import sse_response

from echo_hub.dashboard.model import PagesSource, Readiness
from echo_hub.dashboard.responses import SECURITY_HEADERS, json_response, whole_number
from echo_hub.dashboard.snapshots import Snapshots
from echo_shared.errors import StorageError

STEPS_PER_ANSWER: Final = 1_000
MAX_VIEWERS: Final = 2_000


class Api:
    def __init__(self, source: PagesSource, snapshots: Snapshots) -> None:
        self._source = source
        self._snapshots = snapshots

    async def run(self, _request: web.Request) -> web.Response:
        return json_response((await self._snapshots.get()).run)

    async def nodes(self, _request: web.Request) -> web.Response:
        return json_response({"nodes": (await self._snapshots.get()).nodes})

    async def steps(self, request: web.Request) -> web.Response:
        since = whole_number(request.query.get("since", "0"))
        if since is None:
            return json_response({"error": "since must be a step's number: 0, 1, 2, ..."}, status=400)
        return json_response({"steps": (await self._source.steps(since))[:STEPS_PER_ANSWER]})

    async def leaderboard(self, _request: web.Request) -> web.Response:
        return json_response({"leaderboard": (await self._snapshots.get()).leaderboard})

    async def live(self, _request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        try:
            run = (await self._snapshots.get()).run
        except StorageError as error:
            said = {"status": Readiness.FAILING, "problems": [error.what], "detail": ""}
            return json_response(said, status=503)
        said = {"status": run.readiness, "problems": run.problems, "detail": run.state_detail}
        return json_response(said, status=200 if run.readiness is Readiness.READY else 503)


class EventStream:
    """Tells browsers that something changed, at most once a snapshot; more than `MAX_VIEWERS` at once are sent away.

    A viewer that stops reading is cut off after aiohttp-sse's send timeout; one that is gone, at the next heartbeat.
    """

    def __init__(self, snapshots: Snapshots, *, heartbeat_s: float) -> None:
        self._snapshots = snapshots
        self._heartbeat_s = heartbeat_s
        self.num_viewers = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /api/v1/events"""
        if self.num_viewers >= MAX_VIEWERS:
            return json_response({"error": "too many viewers; reload the page now and then"}, status=503)
        self.num_viewers += 1
        try:
            return await self._stream(request)
        finally:
            self.num_viewers -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        seen = -1
        async with sse_response(request, headers=SECURITY_HEADERS, ping_interval=self._heartbeat_s) as stream:
            try:
                while stream.is_connected():
                    try:
                        async with asyncio.timeout(self._heartbeat_s):
                            snapshot = await self._snapshots.after(seen)
                    except TimeoutError:
                        continue
                    seen, run = snapshot.change, snapshot.run
                    news = {
                        "state": run.state,
                        "trained_step": run.trained_step,
                        "published_version": run.published_version,
                    }
                    await stream.send(json.dumps(news), event="changed")
            except (ConnectionResetError, TimeoutError):
                pass  # The viewer is gone, or no longer reads.
        return stream
