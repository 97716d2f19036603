"""JSON bodies of the Tinker API, in forms that an attacker would send."""

import asyncio
import json
import time

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tinker import bodies
from echo_hub.tinker.bodies import MOST_PROMPT_BYTES, AskSample, BodyRoom, CreateModel, parse_json


def asked(**changed: object) -> bytes:
    body = {"sampling_session_id": "s-1:sample:0", "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]}}
    return json.dumps(body | changed, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling_params": {"stop": [1.5] * 500_000}},
        {"prompt": {"chunks": [{"tokens": [-1] * 600_000}]}},
        {"prompt": {"chunks": [1] * 900_000}},
        {"prompt": {"chunks": [{}] * 600_000}},
    ],
)
def test_a_large_wrong_body_is_refused_soon(changed):
    body = asked(**changed)
    assert len(body) <= MOST_PROMPT_BYTES
    started = time.process_time()
    with pytest.raises(Refusal) as caught:
        parse_json(body, AskSample)
    assert time.process_time() - started < 0.5  # An error for each item would take several seconds.
    assert caught.value.kind is RefusalKind.INVALID
    assert len(str(caught.value)) < 500


def test_a_long_name_of_an_unknown_option_is_cut():
    with pytest.raises(Refusal) as caught:
        parse_json(asked(**{"a" * 1_000_000: 1}), AskSample)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**300])
def test_a_seed_that_cannot_be_stored_is_refused(seed):
    with pytest.raises(Refusal, match="seed"):
        parse_json(asked(sampling_params={"seed": seed}), AskSample)
    model = {"session_id": "s-1", "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 8, "seed": seed}}
    with pytest.raises(Refusal, match="seed"):
        parse_json(json.dumps(model).encode(), CreateModel)


def arriving(size, data):
    """Return a request whose body has `size` bytes, of which `data` has arrived."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    stream = StreamReader(protocol, 2**20, loop=loop)
    stream.feed_data(data)
    if len(data) == size:
        stream.feed_eof()
    return make_mocked_request("POST", "/", headers={"Content-Length": str(size)}, payload=stream)


async def test_tenants_with_large_bodies_cannot_shut_others_out():
    room, large = BodyRoom(), 64 * 2**20

    async def hold(tenant, most):
        async with room.reading(tenant, arriving(most, b"x"), most):
            raise AssertionError("the body has not arrived")

    slow = [asyncio.create_task(hold(tenant, large)) for tenant in ("ada", "bob", "cyd", "dan")]
    await until(lambda: room.num_held_bytes == 4 * large)
    async with room.reading("eve", arriving(2, b"{}"), MOST_PROMPT_BYTES) as body:
        assert body == b"{}"
    with pytest.raises(Refusal, match="large bodies"):
        await hold("eve", large)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert room.num_held_bytes == 0


async def test_a_body_that_stops_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "GRACE_S", 0.05)
    with pytest.raises(Refusal, match="too slowly"):
        await bodies.read_body(arriving(100, b"{"), MOST_PROMPT_BYTES)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_body_that_ends_too_early_is_no_error_of_the_hub(door, caplog):
    host, _, port = door.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /tinker/api/v1/forward_backward HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {door.key}\r\n"
    writer.write(f"{head}Content-Type: application/x-protobuf\r\nContent-Length: 1000\r\n\r\nabc".encode())
    await writer.drain()
    await until(lambda: door.wire.room.num_held_bytes)
    writer.transport.abort()
    await until(lambda: not door.wire.room.num_held_bytes)
    await asyncio.sleep(0)
    assert caplog.records == []
