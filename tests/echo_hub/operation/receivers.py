from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass(slots=True)
class Hook:
    """A webhook receiver that answers with the statuses in `answers`, then with 204. For status 0, it waits until `end`
    is set and then answers 410.
    """

    answers: list[int] = field(default_factory=list)
    got: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((await request.read(), dict(request.headers)))
        self.news.set()
        status = self.answers.pop(0) if self.answers else 204
        if status == 0:
            await self.end.wait()
            status = 410
        headers = {"Location": "/elsewhere"} if status in (302, 307) else {}
        return web.Response(status=status, headers=headers)


@asynccontextmanager
async def webhook() -> AsyncIterator[Hook]:
    hook = Hook()
    application = web.Application()
    application.router.add_post("/hook/{secret}", hook.take)
    application.router.add_route("*", "/elsewhere", hook.take)
    async with TestServer(application) as server:
        hook.url = str(server.make_url("/hook/the-secret-of-this-hook"))
        yield hook
