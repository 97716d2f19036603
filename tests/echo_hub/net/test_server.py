from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net import server as server_module
from echo_hub.net.server import Server
from echo_shared.errors import ConfigError


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


ROUTES = (web.get("/hello", hello),)


def server(**settings: Any) -> Server:
    return Server(ServerConfig.model_validate(settings))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_port_0_becomes_a_real_one(host: str) -> None:
    serving = server(host=host, port=0)
    await serving.open(ROUTES)
    try:
        assert serving.port > 0
        async with aiohttp.ClientSession() as http, http.get(f"{serving.url}/hello") as answer:
            assert await answer.text() == "hello"
    finally:
        await serving.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, serving.port)


async def test_a_port_in_use_is_a_setting_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"(?s)port is in use.*127\.0\.0\.1:{port}.*--port PORT"):
            await server(port=port).open(ROUTES)
    later = server(port=port)
    await later.open(ROUTES)
    assert later.port == port
    await later.close()


async def test_an_address_of_another_machine_is_a_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot listen.*192\.0\.2\.1:0.*server\.host"):
        await server(host="192.0.2.1", port=0).open(ROUTES)


async def test_closing_an_unopened_server_is_harmless() -> None:
    await server().close()


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8710"),
        ({"host": "0.0.0.0", "port": 80}, "http://127.0.0.1:80"),
        ({"host": "::"}, "http://127.0.0.1:8710"),
        ({"host": ""}, "http://127.0.0.1:8710"),
        ({"host": "192.168.1.7"}, "http://192.168.1.7:8710"),
        ({"host": "::1"}, "http://[::1]:8710"),
        ({"host": "hub.example.org"}, "http://hub.example.org:8710"),
        ({"public_url": "https://hub.example.org/echo/"}, "https://hub.example.org/echo"),
    ],
)
def test_the_address_that_nodes_use(settings: dict[str, Any], url: str) -> None:
    assert server(**settings).url == url


async def test_a_systems_low_connection_limit_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "room_for", lambda wanted: wanted - 100)
    serving = server(port=0)
    await serving.open(ROUTES)
    await serving.close()
    assert "9900 connections" in caplog.text and "ulimit -n" in caplog.text


async def test_a_request_that_is_not_http_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiohttp.server")
    serving = server(port=0)
    await serving.open(ROUTES)
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await serving.close()
    (record,) = (record for record in caplog.records if record.name == "aiohttp.server")
    assert record.exc_info is None and record.getMessage().isprintable()
