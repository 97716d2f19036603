"""How a page lives: its address, asked for as HTML, is the page, and as `text/event-stream` what changes in it.

A room says what is looked at (`Look`) and leaves the answer to `LivePages.answer`; its template marks what lives
(`live_parts`). The page is rendered once a snapshot for all who look at the same, and each watcher is sent what changed
since the rendering that it shows. Pages are rendered on a thread, for the hub has more to do. Events of a stream, each
with a JSON object:

    hello    {"of": which run and which files these are: another one's page is loaded anew, "now": the hub's time,
             "silent_s": after as long without an event the stream is dead}
    parts    {"revision": what the page shows then, and what `live_parts.difference` says}
    curves   {"width", "since", "points"}: what is new in /api/v1/curves, for who has the points up to step `since`
    beat     {}: nothing has changed for a while
    gone     {}: there is no such page any more, and the stream ends

The browser asks with `live=REVISION` in the query, the one that its page shows; what is not known of it is sent whole.
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
from echo_hub.dashboard.curves import CurvesRoom, Mark
from echo_hub.dashboard.live_parts import Marks, Rendering, difference, rendering
from echo_hub.dashboard.responses import html_response
from echo_hub.dashboard.snapshots import Snapshot, Snapshots, rest_s
from echo_hub.dashboard.viewers import Viewers
from echo_shared.errors import StorageError

MOST_PAGES: Final = 64
"""That are kept as rendered, those that were looked at last."""
MOST_REVISIONS: Final = 64
"""Of each page, that a browser may come back with."""
SILENT_BEATS: Final = 2.5
"""Heartbeats without an event, after which a browser takes a stream for dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What an address asks for."""

    key: tuple[str, ...]
    """The same for all who are to see the same rendering."""
    prepare: Callable[[Snapshot], Awaitable[Callable[[], str]]]
    """Reads what the page needs, and says what makes the whole of it; raises web.HTTPException where there is none, or
    none any more."""
    personal: Callable[[str], str] = str
    """Puts what is one viewer's own into a page, or into a part of it as JSON."""
    has_curves: bool = False
    """Its charts draw /api/v1/curves."""


def _timed(make: Callable[[], str]) -> tuple[Rendering, float]:
    """What is made, and what that takes of the processor."""
    began_s = time.thread_time()
    made = rendering(make())
    return made, time.thread_time() - began_s


class _Page:
    """One page as all see it who look at it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._of: Snapshot | None = None
        self._newest: Rendering | None = None
        self._known: OrderedDict[str, Marks] = OrderedDict()
        self._news: dict[str, str | None] = {}
        """By the revision that they follow."""
        self.took_s = 0.0
        """What the newest rendering took of the processor."""

    def is_of(self, snapshot: Snapshot) -> bool:
        return self._of is not None and self._of.taken_at >= snapshot.taken_at

    async def rendered(self, look: Look, snapshot: Snapshot) -> Rendering:
        """Of this snapshot or a newer one."""
        async with self._lock:
            if self._newest is None or not self.is_of(snapshot):
                make = await look.prepare(snapshot)
                made, self.took_s = await asyncio.to_thread(_timed, make)
                self._newest = made
                self._of = snapshot
                self._news.clear()
                self._known[made.revision] = made.marks
                if len(self._known) > MOST_REVISIONS:
                    self._known.popitem(last=False)
            return self._newest

    def known(self, revision: str) -> tuple[str, Marks]:
        """A rendering that a browser says it shows; of one that is not known here nothing."""
        return (revision, self._known[revision]) if revision in self._known else ("", {})

    def news(self, revision: str, seen: Marks) -> tuple[str | None, str, Marks]:
        """The event of what changed since the rendering of that revision, None where nothing did, and what its browser
        shows then."""
        newest = self._newest
        assert newest is not None
        if revision not in self._news:
            news = difference(seen, newest)
            told = json.dumps({"revision": newest.revision, **news}, separators=(",", ":"))
            self._news[revision] = told if news else None
        return self._news[revision], newest.revision, newest.marks


class _Turns:
    """Lets renderings be made one by one, of all watched pages together, with a rest after each: the more there are,
    the seldomer they change."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    async def render(self, page: _Page, look: Look, snapshot: Snapshot) -> None:
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if page.is_of(snapshot):  # By now, for somebody else.
                return
            await asyncio.sleep(max(0.0, self._free_at - clock()))
            await page.rendered(look, snapshot)
            self._free_at = clock() + rest_s(page.took_s)


class LivePages:
    """`of` names the files that pages load (`Assets.version`)."""

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

    async def answer(self, request: web.Request, look: Look) -> web.StreamResponse:
        """The page, or its stream."""
        if request.method == "GET" and "text/event-stream" in request.headers.get("Accept", ""):
            return await self._viewers.admit(request, lambda request: self._stream(request, look))
        made = await self._page(look).rendered(look, await self._snapshots.get())
        text = made.text.replace("<html ", f'<html data-revision="{made.revision}" ', 1)
        response = html_response(look.personal(text))
        response.headers["Vary"] = "Accept"
        return response

    def _page(self, look: Look) -> _Page:
        page = self._pages.setdefault(look.key, _Page())
        self._pages.move_to_end(look.key)
        if len(self._pages) > MOST_PAGES:
            self._pages.popitem(last=False)
        return page

    async def _stream(self, request: web.Request, look: Look) -> web.StreamResponse:
        page, is_operator = self._page(look), self._guard.is_operator(request)
        snapshot = await self._snapshots.get()
        await page.rendered(look, snapshot)  # Where there is no such page, it is answered so.
        async with sse_response(request, ping_interval=self._heartbeat_s, headers={"Vary": "Accept"}) as stream:
            watcher = _Watcher(stream, look, page, self._curves, shows=request.query.get("live", ""))
            # The viewer goes away, or no longer reads; or the books cannot be read now, and it comes back later.
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
    """One open stream, and what its browser shows."""

    def __init__(self, stream: EventSourceResponse, look: Look, page: _Page, curves: CurvesRoom, *, shows: str) -> None:
        self._stream = stream
        self._look = look
        self._page = page
        self._curves = curves
        self._revision, self._seen = page.known(shows)
        self._told_step = -1
        self._mark: Mark | None = None

    async def tell(self, event: str, what: Mapping[str, object]) -> None:
        await self._stream.send(json.dumps(what, separators=(",", ":")), event=event)

    async def show(self, snapshot: Snapshot) -> None:
        """Tells what changed."""
        news, self._revision, self._seen = self._page.news(self._revision, self._seen)
        if news is not None:
            await self._stream.send(self._look.personal(news), event="parts")
        if self._look.has_curves and snapshot.run.trained_step != self._told_step:
            self._told_step = snapshot.run.trained_step
            self._mark, points = await self._curves.news(self._mark)
            await self.tell("curves", points)
