"""Cached pictures of nodes and teams, for sharing on other sites. A picture is drawn when it is first requested. The
hub draws one at a time, so that many requests cannot occupy the machine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import hdrs, web

from echo_hub.dashboard.share_picture import SharePicture, draw

GOOD_S: Final = 600.0
"""Seconds for which a picture stays in the cache."""
MOST_KEPT: Final = 256
"""Largest number of pictures cached, about 40 kB each."""
MOST_WAITING: Final = 16
"""Largest number of requests that wait for drawing. Further requests are refused, with the advice to try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPicture:
    body: bytes
    tag: str
    good_until: float

    def answer(self, request: web.Request) -> web.Response:
        headers = {hdrs.CACHE_CONTROL: f"public, max-age={GOOD_S:.0f}", hdrs.ETAG: self.tag}
        if self.tag in request.headers.get(hdrs.IF_NONE_MATCH, ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self.body, content_type="image/png", headers=headers)


class Pictures:
    def __init__(self) -> None:
        self._kept: dict[str, DrawnPicture] = {}
        self._drawing = asyncio.Lock()
        self._waiting = 0
        self.num_drawn = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Let only the caller draw inside the block. Raises HTTPServiceUnavailable if too many callers wait."""
        if self._waiting >= MOST_WAITING:
            later = {hdrs.RETRY_AFTER: "5"}
            raise web.HTTPServiceUnavailable(text="Too many pictures at once. Try again.\n", headers=later)
        self._waiting += 1
        try:
            async with self._drawing:
                yield
        finally:
            self._waiting -= 1

    def find(self, holder: str) -> DrawnPicture | None:
        """Return the holder's picture if it is cached and not too old."""
        drawn = self._kept.get(holder)
        return drawn if drawn and asyncio.get_running_loop().time() < drawn.good_until else None

    async def draw(self, holder: str, said: SharePicture) -> DrawnPicture:
        body = await asyncio.to_thread(draw, said)
        self.num_drawn += 1
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        drawn = DrawnPicture(body=body, tag=tag, good_until=asyncio.get_running_loop().time() + GOOD_S)
        self._kept.pop(holder, None)
        self._kept[holder] = drawn
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return drawn
