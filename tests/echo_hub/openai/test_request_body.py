"""Memory limits for request bodies of several tenants, and bodies that never end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from echo_hub.openai import request_body
from echo_hub.openai.request_body import BodyReader
from echo_hub.tenants.refusal import Refusal, RefusalKind


def arriving(data: bytes, *, is_whole: bool = True) -> web.Request:
    """Return a request whose body arrives as `data`, and then ends or stops."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    stream = StreamReader(protocol, 2**16, loop=loop)
    stream.feed_data(data)
    if is_whole:
        stream.feed_eof()
    return make_mocked_request("POST", "/v1/completions", payload=stream)


async def held(reader: BodyReader, tenant_id: str, num_bytes: int, stack: AsyncExitStack) -> None:
    data = b'"' + b"x" * (num_bytes - 9) + b'":1}'
    await stack.enter_async_context(reader.read(arriving(b"{" + data), tenant_id))


async def test_tenants_with_large_bodies_cannot_shut_others_out() -> None:
    reader = BodyReader(most_bytes=2**20, most_held_bytes=48 * 2**10)
    async with AsyncExitStack() as stack:
        for tenant in ("ada", "bob"):
            await held(reader, tenant, 24 * 2**10, stack)
        await held(reader, "eve", 2**10, stack)
        with pytest.raises(Refusal) as refused:
            await held(reader, "eve", 2**11, stack)
        assert refused.value.kind is RefusalKind.TOO_MANY
        with pytest.raises(Refusal):
            await held(reader, "ada", 2**10, stack)
    assert reader.num_held_bytes == 0


async def test_a_body_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "LONGEST_S", 0.05)
    reader = BodyReader()
    with pytest.raises(Refusal, match="too slowly"):
        async with reader.read(arriving(b'{"model":', is_whole=False), "ada"):
            raise AssertionError("the body has not arrived")
    assert reader.num_held_bytes == 0
