"""Live pages: an address returns the page as HTML, or the page's changes as `text/event-stream`.

A page module describes a page by a `LiveRequest` and calls `LivePages.answer`. Its template marks the live parts
(`live_parts`). A page is rendered once for each snapshot; all watchers share the rendering. Each watcher gets the
changes since the rendering that the watcher's browser shows. Rendering runs on a thread, because the event loop has
other work. A stream has these events, each with a JSON object:

    hello    {"of": id of run and static files; if it differs, the browser reloads the page, "now": the hub's time,
             "silent_s": after this time without an event the stream is dead}
    parts    {"revision": the revision shown after this event, and the fields of `live_parts.difference`}
    curves   {"width", "since", "points"}: new points of /api/v1/curves, for a browser that has those up to `since`
    beat     {}: nothing has changed for a while
    gone     {}: the page no longer exists, and the stream ends

The browser sends the revision (the rendering's id) that it shows as `live=REVISION` in the query. If the hub does not
know that revision, it sends all parts in full.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from aiohttp_sse import EventSourceResponse, sse_response

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.curves import CurveMark, CurvesRoom
from echo_hub.dashboard.live_parts import Marks, Rendering, difference, rendering
from echo_hub.dashboard.responses import html_response
from echo_hub.dashboard.snapshots import Snapshot, Snapshots, rest_s
from echo_hub.dashboard.viewers import Viewers
from echo_shared.errors import StorageError

MOST_PAGES: Final = 64
"""Number of rendered pages kept in memory. If there are more, the least recently used page is dropped."""
MOST_REVISIONS: Final = 64
"""Number of past renderings of each page whose fingerprints are remembered. So browsers that reconnect get only
changes.
"""
SILENT_BEATS: Final = 2.5
"""Number of heartbeat intervals without an event after which a browser considers a stream dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """Describes a page that is updated live, and how to render it."""

    key: tuple[str, ...]
    """Key of the page. All requests with this key share one rendered page."""
    prepare: Callable[[Snapshot], Awaitable[Callable[[], str]]]
    """Reads the page's data and returns a function that renders it. Raises web.HTTPException if the page does not
    exist."""
    personal: Callable[[str], str] = str
    """Inserts values of this one viewer, such as the hub address, into a page or into an event's JSON."""
    has_curves: bool = False
    """True if the page's charts draw /api/v1/curves."""


class _Page:
    """One live page, rendered once for all its watchers."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._of: Snapshot | None = None
        self._newest: Rendering | None = None
        self._known: OrderedDict[str, Marks] = OrderedDict()
        self._news: dict[str, str | None] = {}
        """Maps each older revision to the event that updates it to the newest revision; None if nothing changed."""
        self.took_s = 0.0
        """Processor time of the newest rendering, in seconds."""

    def is_of(self, snapshot: Snapshot) -> bool:
        return self._of is not None and self._of.taken_at >= snapshot.taken_at

    async def rendered(self, look: LiveRequest, snapshot: Snapshot) -> Rendering:
        """Return a rendering of this snapshot or a newer one."""
        async with self._lock:
            if self._newest is None or not self.is_of(snapshot):
                render = await look.prepare(snapshot)

                def timed() -> tuple[Rendering, float]:
                    began_s = time.thread_time()
                    return rendering(render()), time.thread_time() - began_s

                made, self.took_s = await asyncio.to_thread(timed)
                self._newest = made
                self._of = snapshot
                self._news.clear()
                self._known[made.revision] = made.marks
                if len(self._known) > MOST_REVISIONS:
                    self._known.popitem(last=False)
            return self._newest

    def known(self, revision: str) -> tuple[str, Marks]:
        """Return a revision that a browser shows, and the fingerprints of that revision; "" and {} if the hub does not
        know it."""
        return (revision, self._known[revision]) if revision in self._known else ("", {})

    def news(self, revision: str, seen: Marks) -> tuple[str | None, str, Marks]:
        """Return the event that updates `revision` to the newest revision, the newest revision, and its fingerprints.
        The event is None if nothing changed.
        """
        newest = self._newest
        assert newest is not None
        if revision not in self._news:
            news = difference(seen, newest)
            told = json.dumps({"revision": newest.revision, **news}, separators=(",", ":"))
            self._news[revision] = told if news else None
        return self._news[revision], newest.revision, newest.marks


class _Turns:
    """Renders pages that viewers watch, one page at a time, with a pause after each. The more processor time a page
    takes, the longer the pause. So watching more pages makes updates of each page rarer."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    async def render(self, page: _Page, look: LiveRequest, snapshot: Snapshot) -> None:
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if page.is_of(snapshot):  # Another watcher had the page rendered while this call waited.
                return
            await asyncio.sleep(max(0.0, self._free_at - clock()))
            await page.rendered(look, snapshot)
            self._free_at = clock() + rest_s(page.took_s)


class LivePages:
    """Serves all live pages. `of` identifies the version of the static files that the pages load (`Assets.version`)."""

    def __init__(
        self, snapshots: Snapshots, guard: Guard, viewers: Viewers, curves: CurvesRoom, *, of: str, heartbeat_s: float
    ) -> None:
        self._snapshots = snapshots
        self._guard = guard
        self._viewers = viewers
        self._curves = curves
        self._of = of
        self._heartbeat_s = heartbeat_s
        self._pages: OrderedDict[tuple[str, ...], _Page] = OrderedDict()
        self._turns = _Turns()

    async def answer(self, request: web.Request, look: LiveRequest) -> web.StreamResponse:
        if request.method == "GET" and "text/event-stream" in request.headers.get("Accept", ""):
            with self._viewers.admitted(request) as refusal:
                return await self._stream(request, look) if refusal is None else refusal
        made = await self._page(look).rendered(look, await self._snapshots.get())
        text = made.text.replace("<html ", f'<html data-revision="{made.revision}" ', 1)
        response = html_response(look.personal(text))
        response.headers["Vary"] = "Accept"
        return response

    def _page(self, look: LiveRequest) -> _Page:
        page = self._pages.setdefault(look.key, _Page())
        self._pages.move_to_end(look.key)
        if len(self._pages) > MOST_PAGES:
            self._pages.popitem(last=False)
        return page

    async def _stream(self, request: web.Request, look: LiveRequest) -> web.StreamResponse:
        page, is_operator = self._page(look), self._guard.is_operator(request)
        snapshot = await self._snapshots.get()
        # Render before the stream starts, so that a missing page raises HTTPException here.
        await page.rendered(look, snapshot)
        async with sse_response(request, ping_interval=self._heartbeat_s, headers={"Vary": "Accept"}) as stream:
            watcher = _Watcher(stream, look, page, self._curves, shows=request.query.get("live", ""))
            # These errors are expected: the viewer left or stopped reading, or the database is unreachable now. The
            # browser reconnects later.
            with suppress(ConnectionResetError, TimeoutError, StorageError):
                of = f"{snapshot.run.run_id}.{self._of}"
                silent_s = SILENT_BEATS * self._heartbeat_s
                await watcher.tell("hello", {"of": of, "now": time.time(), "silent_s": silent_s})
                await watcher.show(snapshot)
                while stream.is_connected() and self._guard.is_operator(request) == is_operator:
                    try:
                        async with asyncio.timeout(self._heartbeat_s):
                            snapshot = await self._snapshots.after(snapshot.change)
                    except TimeoutError:
                        await watcher.tell("beat", {})
                        continue
                    try:
                        await self._turns.render(page, look, snapshot)
                    except web.HTTPException:
                        await watcher.tell("gone", {})
                        break
                    await watcher.show(snapshot)
        return stream


class _Watcher:
    """One open event stream, and the revision of the page that its browser shows now."""

    def __init__(
        self, stream: EventSourceResponse, look: LiveRequest, page: _Page, curves: CurvesRoom, *, shows: str
    ) -> None:
        self._stream = stream
        self._look = look
        self._page = page
        self._curves = curves
        self._revision, self._seen = page.known(shows)
        self._told_step = -1
        self._mark: CurveMark | None = None

    async def tell(self, event: str, what: Mapping[str, object]) -> None:
        await self._stream.send(json.dumps(what, separators=(",", ":")), event=event)

    async def show(self, snapshot: Snapshot) -> None:
        """Send the browser what has changed between its revision and this snapshot."""
        news, self._revision, self._seen = self._page.news(self._revision, self._seen)
        if news is not None:
            await self._stream.send(self._look.personal(news), event="parts")
        if self._look.has_curves and snapshot.run.trained_step != self._told_step:
            self._told_step = snapshot.run.trained_step
            self._mark, points = await self._curves.news(self._mark)
            await self.tell("curves", points)
