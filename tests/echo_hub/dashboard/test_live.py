from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, web
from aiohttp.test_utils import TestServer

from echo_hub.dashboard import live
from echo_hub.dashboard.curves import CurvesRoom
from echo_hub.dashboard.live import LivePages, LiveRequest
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.viewers import Viewers
from echo_shared.errors import StorageError

STREAM = {"Accept": "text/event-stream"}


async def events(viewer: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in viewer.content:
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line.removeprefix(b"data: "))


async def one(told: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    async for found, news in told:
        if found == name:
            return news
    raise AssertionError(f"the stream ended without {name}")


async def revision_of(hub: ClientSession, path: str) -> str:
    async with hub.get(path) as response:
        assert response.headers["Vary"].startswith("Accept")
        found = re.search(r'<html data-revision="(\w+)"', await response.text())
    assert found is not None
    return found[1]


async def test_a_viewer_is_told_the_changes_of_its_page(hub: ClientSession, source: Any) -> None:
    shown = await revision_of(hub, "/")
    async with hub.get(f"/?live={shown}", headers=STREAM) as viewer:
        assert viewer.content_type == "text/event-stream"
        assert "script-src 'self'" in viewer.headers["Content-Security-Policy"]
        told = events(viewer)
        name, hello = await anext(told)
        assert name == "hello" and hello["of"].startswith("3f9a1c62d0b84e7a.")
        assert await anext(told) == ("curves", {"width": 1, "since": 37, "points": []}), "nothing of the page is new"
        source.advance()
        news = await one(told, "parts")
        assert news["title"] == "38/60 · echo · Echo"
        assert "38" in news["parts"]["now"]
        assert list(news["rows"]["steps"]["changed"]) == ["step-38"]
        assert news["rows"]["steps"]["order"][:2] == ["step-38", "step-37"]
        curves = await one(told, "curves")
        assert (curves["since"], [point["step"] for point in curves["points"]]) == (37, [38])
        assert news["revision"] == await revision_of(hub, "/")


async def test_a_viewer_with_an_unknown_page_gets_all_of_it(hub: ClientSession) -> None:
    async with hub.get("/leaderboard?live=0123", headers=STREAM) as viewer:
        news = await one(events(viewer), "parts")
    async with hub.get("/leaderboard") as response:
        live_ids = set(re.findall(r'id="([\w-]+)" data-live', await response.text()))
    assert set(news["parts"]) | set(news["rows"]) == live_ids
    assert len(news["rows"]["rows"]["order"]) == 2


async def test_a_returning_viewer_gets_the_missed_changes(hub: ClientSession, source: Any) -> None:
    shown = await revision_of(hub, "/leaderboard")
    async with hub.get(f"/leaderboard?live={shown}", headers=STREAM):
        pass
    source.advance()
    async with hub.get(f"/leaderboard?live={shown}", headers=STREAM) as viewer:
        news = await one(events(viewer), "parts")
    assert "invite" not in news["parts"] and "hero" in news["parts"]


async def test_a_page_is_the_operators_in_its_stream_too(open_hub: Any, source: Any) -> None:
    async with (await open_hub(source, token="")).get("/", headers=STREAM) as refused:
        assert refused.status == 401


async def test_a_stream_ends_with_the_session_that_opened_it(
    open_hub: Any, source: Any, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = await open_hub(source)
    async with hub.get("/", headers=STREAM) as viewer:
        told = events(viewer)
        await one(told, "curves")
        monkeypatch.setattr(guard, "is_operator", lambda request: False)
        source.advance()
        with pytest.raises(AssertionError, match="the stream ended"):
            await one(told, "never")


async def test_a_quiet_stream_beats(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source, heartbeat_s=0.02)
    async with hub.get("/leaderboard", headers=STREAM) as viewer:
        told = events(viewer)
        assert await one(told, "beat") == {}
        source.advance()
        assert "title" not in await one(told, "parts")


class Gone(web.HTTPNotFound):
    def __init__(self, said: str) -> None:
        super().__init__(text=said)


class Served:
    def __init__(self, source: Any, guard: Any) -> None:
        self.text = page("a")
        self.fails: type[Exception] | None = None
        self.num_rendered = 0
        snapshots = Snapshots(source, min_interval_s=0.01)
        self.pages = LivePages(snapshots, guard, Viewers(guard), CurvesRoom(source), of="files", heartbeat_s=5.0)

    async def prepare(self, _snapshot: Snapshot) -> Callable[[], str]:
        self.num_rendered += 1
        if self.fails is not None:
            raise self.fails("of this test")
        return lambda: self.text

    async def serve(self, request: web.Request) -> web.StreamResponse:
        def personal(text: str) -> str:
            return text.replace("MINE", request.query.get("who", ""))

        key = (request.query.get("key", ""),)
        return await self.pages.answer(request, LiveRequest(key=key, prepare=self.prepare, personal=personal))


def page(said: str) -> str:
    return f'<!doctype html><html lang="en"><title>t</title><p id="said" data-live>{said}</p></html>'


@asynccontextmanager
async def serving(source: Any, guard: Any) -> AsyncIterator[tuple[Served, ClientSession]]:
    served = Served(source, guard)
    application = web.Application()
    application.router.add_get("/", served.serve)
    async with TestServer(application) as server, ClientSession(server.make_url("/")) as session:
        yield served, session


async def test_a_missing_page_is_not_found_and_a_removed_one_ends_its_stream(source: Any, guard: Any) -> None:
    async with serving(source, guard) as (served, session):
        served.fails = Gone
        for headers in ({}, STREAM):
            async with session.get("/", headers=headers) as answer:
                assert answer.status == 404
        served.fails = None
        async with session.get("/", headers=STREAM) as viewer:
            told = events(viewer)
            await one(told, "parts")
            served.fails = Gone
            source.changes.notify()
            assert await one(told, "gone") == {}
            assert [event async for event in told] == []


async def test_a_stream_ends_where_the_books_cannot_be_read(source: Any, guard: Any) -> None:
    async with serving(source, guard) as (served, session), session.get("/", headers=STREAM) as viewer:
        told = events(viewer)
        await one(told, "parts")
        served.fails = StorageError
        source.changes.notify()
        assert [event async for event in told] == []


async def test_viewers_of_one_page_share_a_rendering_and_keep_their_own_parts(source: Any, guard: Any) -> None:
    async with serving(source, guard) as (served, session):
        viewers = [await session.get("/", params={"who": f"v{i}"}, headers=STREAM) for i in range(20)]
        told = [events(viewer) for viewer in viewers]
        for stream in told:
            await one(stream, "parts")
        rendered = served.num_rendered
        served.text = page("of MINE")
        source.changes.notify()
        for number, stream in enumerate(told):
            assert (await one(stream, "parts"))["parts"] == {"said": f"of v{number}"}
        assert served.num_rendered - rendered == 1
        for viewer in viewers:
            viewer.close()


async def test_renderings_of_many_watched_pages_pause_in_between(
    source: Any, guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "rest_s", lambda _: 0.0)
    async with serving(source, guard) as (served, session):
        viewers = [await session.get("/", params={"key": str(i)}, headers=STREAM) for i in range(5)]
        told = [events(viewer) for viewer in viewers]
        for stream in told:
            await one(stream, "parts")
        slept: list[float] = []
        sleep = asyncio.sleep

        async def counted(seconds: float) -> None:
            slept.append(seconds)
            await sleep(0)

        monkeypatch.setattr(live, "rest_s", lambda _: 1e6)
        monkeypatch.setattr(live.asyncio, "sleep", counted)
        served.text = page("b")
        source.changes.notify()
        for stream in told:
            assert (await one(stream, "parts"))["parts"] == {"said": "b"}
        for viewer in viewers:
            viewer.close()
    assert len([seconds for seconds in slept if seconds > 1.0]) >= 4, (
        "each viewer but the first waits for the earlier ones"
    )
