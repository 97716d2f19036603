"""Read the JSON body of a request within limits of memory.

A body is one strict JSON object (`echo_shared.files.strict_json`). Until bodies are parsed, they count towards a
memory limit: `MOST_HELD_BYTES` for all tenants together, half of that for one tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import hdrs, web

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_shared.files.strict_json import read_json

MOST_BODY_BYTES: Final = 8 * 2**20
MOST_HELD_BYTES: Final = 48 * 2**20
_ALWAYS: Final = 24
"""Each tenant may always use this fraction (1 / `_ALWAYS`) of the memory, so that large bodies of other tenants cannot
shut it out."""
LONGEST_S: Final = 300.0
"""Longest time in seconds that a body may take to arrive."""
_SHORT_BYTES: Final = 64 * 2**10
"""Size in bytes above which bodies are parsed in a thread: 8 MiB of token ids take a second."""


class BodyReader:
    """Reads request bodies, and counts for each tenant the bytes that it holds."""

    def __init__(self, *, most_bytes: int = MOST_BODY_BYTES, most_held_bytes: int = MOST_HELD_BYTES) -> None:
        self._most = most_bytes
        self._most_held = most_held_bytes
        self._held: Counter[str] = Counter()

    @property
    def num_held_bytes(self) -> int:
        return self._held.total()

    @asynccontextmanager
    async def read(self, request: web.Request, tenant_id: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON object. The body's bytes count until the context ends.

        Raises Refusal for an oversized body, for anything except a JSON object, and at the memory limit.
        """
        if (request.content_length or 0) > self._most:
            raise self._too_large()
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            raise Refusal(
                RefusalKind.INVALID,
                "The body of the request is compressed.",
                got=request.headers[hdrs.CONTENT_ENCODING][:100],
                do="Send it without Content-Encoding.",
            )
        body, held = bytearray(), 0
        try:
            async for chunk in _chunks(request):
                body += chunk
                if len(body) > self._most:
                    raise self._too_large()
                self._hold(tenant_id, len(chunk))
                held += len(chunk)
            yield await _parsed(bytes(body))
        finally:
            self._held[tenant_id] -= held
            if not self._held[tenant_id]:
                del self._held[tenant_id]

    def _hold(self, tenant_id: str, num_bytes: int) -> None:
        of_tenant = self._held[tenant_id] + num_bytes
        is_full = self._held.total() + num_bytes > self._most_held and of_tenant > self._most_held // _ALWAYS
        if is_full or of_tenant > self._most_held // 2:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "The hub is reading too many large requests at once.",
                do="Send the request again in a moment.",
                retry_after_s=1.0,
            )
        self._held[tenant_id] += num_bytes

    def _too_large(self) -> Refusal:
        return Refusal(
            RefusalKind.TOO_LARGE,
            "The body of the request is too large.",
            got=f"more than {self._most:,} bytes",
            do="Send fewer or shorter prompts in one request.",
        )


async def _chunks(request: web.Request) -> AsyncIterator[bytes]:
    ends_at = time.monotonic() + LONGEST_S
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(ends_at - time.monotonic()):
                chunk = await request.content.readany()
            yield chunk
    except TimeoutError as error:
        raise Refusal(
            RefusalKind.INVALID,
            "The body of the request arrived too slowly.",
            got=f"not whole after {LONGEST_S:.0f} s",
            do="Send the request again, over a faster connection.",
        ) from error
    except (ConnectionError, web.RequestPayloadError) as error:
        raise Refusal(
            RefusalKind.INVALID, "The body of the request did not arrive whole.", do="Send the request again."
        ) from error


async def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = read_json(body) if len(body) <= _SHORT_BYTES else await asyncio.to_thread(read_json, body)
    except ValueError as error:
        raise Refusal(
            RefusalKind.INVALID, "The body of the request cannot be read.", got=str(error), do="Send one JSON object."
        ) from error
    if not isinstance(value, dict):
        raise Refusal(
            RefusalKind.INVALID,
            "The body of the request is not a JSON object.",
            got=type(value).__name__,
            do="Send one JSON object.",
        )
    return value
