"""The JSON API, /api/v1/: the views of `model` as JSON, and a stream that announces changes.

GET /api/v1/run             one object: `RunView`
GET /api/v1/nodes           {"nodes": [`NodeView`, ...], "found": F}: connected nodes and the 10,000 foremost others
                            (all nodes: echo-hub nodes). `q`, `state`, `standing`, `engine`, `precision`, `sort` and
                            `after` as on the page /fleet; F nodes match, `limit` of them are returned
GET /api/v1/nodes/ID        one node in full: see `fleet_node_page`
GET /api/v1/steps?since=N   {"steps": [`StepRecord`, ...]}, the first 1,000 steps after N in order; default N is 0.
                            For more, ask again with N = the last step, until an answer has fewer than 1,000
GET /api/v1/curves          {"width": W, "points": [...]}, all steps in at most 600 points: see `curves`
GET /api/v1/leaderboard?after=N  {"leaderboard": [`Standing`, ...], "found": F}, the first 1,000 rows after N in order;
                            `sort`, `q` and `limit` as on the page; /api/v1/teams in the same way
GET /api/v1/leaderboard/nodes/ID, /api/v1/leaderboard/teams/NAME  one holder: its days and the effect of its work
GET /api/v1/receipts/ID     one rollout's `PublicReceipt`
GET /api/v1/rollouts        rollouts, and /api/v1/rollouts/GROUP one group of them: see `rollouts_page`
GET /api/v1/events          server-sent `changed` {"state", "trained_step", "published_version"}, with comments between
GET /api/v1/log             the event log: see `log_page`
GET /healthz                {"status": "ok", "state": "starting" | "live" | "ready" | "degraded" | "finished"}. Always
                            200: the process is alive, and a restart would not help. For the operator also "reasons":
                            [text, ...], why the state is not better
GET /readyz                 {"status": "starting" | "ready" | "failing"}: 200 when ready to train, else 503. For the
                            operator also "problems": [text, ...], including alarms that the hub retries by itself,
                            and "detail": text

Leaderboard, receipts, events, /healthz and /readyz are public; all others need the operator
(`echo_hub.dashboard.access.guard`). Fields are only ever added. Answers are at most a moment old; a `changed` event is
never ahead of later answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from aiohttp import web
from aiohttp_sse import sse_response

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.fleet import WrongFleetQueryError, find_nodes, fleet_query
from echo_hub.dashboard.model import Readiness
from echo_hub.dashboard.responses import MAX_NUMBER, json_response, large_json_response, whole_number
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.source import PagesSource
from echo_hub.dashboard.viewers import Viewers
from echo_shared.errors import StorageError

STEPS_PER_ANSWER: Final = 1_000


class Api:
    def __init__(self, source: PagesSource, snapshots: Snapshots, guard: Guard) -> None:
        self._source = source
        self._snapshots = snapshots
        self._guard = guard

    async def run(self, _request: web.Request) -> web.Response:
        return await large_json_response((await self._snapshots.get()).run)

    async def nodes(self, request: web.Request) -> web.Response:
        limit = whole_number(request.query.get("limit", str(MAX_NUMBER)))
        if not limit:
            return json_response({"error": "limit must be a number of nodes: 1, 2, ..."}, status=400)
        try:
            wanted = fleet_query(request.query, limit=limit)
        except WrongFleetQueryError as error:
            return json_response({"error": str(error)}, status=400)
        part = await asyncio.to_thread(find_nodes, (await self._snapshots.get()).nodes, wanted)
        return await large_json_response({"nodes": part.nodes, "found": part.num_found})

    async def steps(self, request: web.Request) -> web.Response:
        since = whole_number(request.query.get("since", "0"))
        if since is None:
            return json_response({"error": "since must be a step's number: 0, 1, 2, ..."}, status=400)
        steps = (await self._source.steps(since))[:STEPS_PER_ANSWER]
        return await large_json_response({"steps": steps})

    async def live(self, request: web.Request) -> web.Response:
        health = self._source.health()
        why = {"reasons": health.reasons} if self._guard.is_operator(request) else {}
        return json_response({"status": "ok", "state": health.state, **why})

    async def ready(self, request: web.Request) -> web.Response:
        try:
            run = (await self._snapshots.get()).run
        except StorageError as error:
            readiness, why = Readiness.FAILING, {"problems": (error.what,), "detail": ""}
        else:
            readiness, why = run.readiness, {"problems": run.problems, "detail": run.state_detail}
        said = {"status": readiness, **(why if self._guard.is_operator(request) else {})}
        return json_response(said, status=200 if readiness is Readiness.READY else 503)


class EventStream:
    """Tells programs about changes of the run, at most once per snapshot.

    A client that stops reading is disconnected after aiohttp-sse's send timeout. A closed connection is noticed at the
    next heartbeat.
    """

    def __init__(self, snapshots: Snapshots, viewers: Viewers, *, heartbeat_s: float) -> None:
        self._snapshots = snapshots
        self._viewers = viewers
        self._heartbeat_s = heartbeat_s

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /api/v1/events"""
        with self._viewers.admitted(request) as refusal:
            return await self._stream(request) if refusal is None else refusal

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        seen = -1
        async with sse_response(request, ping_interval=self._heartbeat_s) as stream:
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
            except (ConnectionResetError, TimeoutError, StorageError):
                # The client left or stopped reading, or the database cannot be read now. The client reconnects later.
                pass
        return stream
