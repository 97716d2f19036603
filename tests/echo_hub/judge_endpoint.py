"""A real HTTP server on loopback in place of an LLM judge. It gives valid or invalid answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Says = str | int | web.Response
"""Scripted answer of the judge: a text, an HTTP status, a whole response, or one of the two constants below."""
HANGS = "(hangs)"
CLOSES = "(closes the connection)"


def completed(text: str, *, finish_reason: str = "stop") -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 5}})


@dataclass(eq=False)
class FakeEndpoint:
    """A judge that answers with the entries of `script` in order, then by `rule`; `asked` collects the request
    bodies.
    """

    script: list[Says] = field(default_factory=list)
    rule: Callable[[str], Says] = lambda said: "<score>7</score>"
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    gathers: int = 0
    """Number of requests that must be waiting before the server answers any of them; 0: answer at once."""
    gathered: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.gathers:
                if self.at_once == self.gathers:
                    self.gathered.set()
                await self.gathered.wait()
            says = self.script.pop(0) if self.script else self.rule(body["messages"][-1]["content"])
            if says == HANGS:
                await asyncio.Event().wait()
            if says == CLOSES:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if isinstance(says, int):
                return web.Response(status=says, text="not now")
            return completed(says) if isinstance(says, str) else says
        finally:
            self.at_once -= 1


@asynccontextmanager
async def served() -> AsyncIterator[FakeEndpoint]:
    fake = FakeEndpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app, shutdown_timeout=0.1) as server:
        fake.url = str(server.make_url("/v1"))
        yield fake


def contents(asked: Sequence[dict[str, Any]]) -> list[str]:
    return [body["messages"][-1]["content"] for body in asked]
