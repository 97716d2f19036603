from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from echo_hub.dashboard import viewers
from echo_hub.dashboard.api import EventStream
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.viewers import Viewers

STREAMS = {"/api/v1/events": "changed", "/leaderboard": "hello"}
"""Event streams that need no login, with the name of the first event of each."""


async def first_event(session: ClientSession, path: str, **options: Any) -> str:
    async with session.get(path, **options) as viewer:
        assert viewer.status == 200
        async for line in viewer.content:
            if line.startswith(b"event: "):
                return line.removeprefix(b"event: ").decode().strip()
    raise AssertionError("the stream ended")


async def test_a_viewer_that_leaves_is_forgotten(source: Any, guard: Any) -> None:
    watched = Viewers(guard)
    stream = EventStream(Snapshots(source, min_interval_s=0), watched, heartbeat_s=0.02)
    ended = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        try:
            return await stream.serve(request)
        finally:
            ended.set()

    application = web.Application()
    application.router.add_get("/", serve)
    async with TestServer(application) as server, ClientSession() as session:
        viewer = await session.get(server.make_url("/"))
        await viewer.content.readline()
        assert len(watched) == 1
        viewer.close()
        async with asyncio.timeout(60):
            await ended.wait()
        assert len(watched) == 0


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("most", ["MAX_VIEWERS", "MAX_VIEWERS_OF_ADDRESS"])
async def test_one_viewer_too_many_is_sent_away_and_the_operator_is_not(
    open_hub: Any, source: Any, guard: Any, monkeypatch: pytest.MonkeyPatch, most: str, path: str
) -> None:
    monkeypatch.setattr(viewers, most, 1)
    public = await open_hub(source, token="")
    accept = {"Accept": "text/event-stream"}
    async with public.get("/api/v1/events", headers=accept) as viewer:
        await viewer.content.readline()
        async with public.get(path, headers=accept) as refused:
            assert refused.status == 503 and "too many viewers" in (await refused.json())["error"]
        as_operator = {"Authorization": f"Bearer {guard.credentials.token}", **accept}
        assert await first_event(public, path, headers=as_operator) == STREAMS[path]
