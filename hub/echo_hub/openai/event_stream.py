"""Server-sent events to one client, as the OpenAI API streams completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import hdrs, web

WRITE_S: Final = 60.0
"""Longest time in seconds that a client may take to read what was sent."""


class ChunkStream:
    """Writes chunks. All methods raise ConnectionError if the client is gone or has read nothing for `WRITE_S`
    seconds."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
                hdrs.CACHE_CONTROL: "no-store",
                "X-Accel-Buffering": "no",  # Keeps nginx from collecting the events.
            }
        )

    @property
    def is_open(self) -> bool:
        """True after the head of the response was sent."""
        return self.response.prepared

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, chunk: Mapping[str, Any]) -> None:
        await self._write(f"data: {json.dumps(chunk, allow_nan=False, separators=(',', ':'))}\n\n")

    async def comment(self, text: str) -> None:
        """Send a comment, which clients skip. It keeps the connection open while nothing is drawn."""
        await self._write(f": {' '.join(text.split())}\n\n")

    async def end(self) -> None:
        await self._write("data: [DONE]\n\n")

    async def _write(self, text: str) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await self.response.write(text.encode())
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from error
