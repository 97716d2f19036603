"""A hub tells others its public URL, else the host that a client's request names, or its own address on the network."""

from __future__ import annotations

import ipaddress

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer, make_mocked_request

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.own_address import outward_ip, requested_address, shared_address


def asked(host: str, settings: ServerConfig, **headers: str) -> str:
    return requested_address(make_mocked_request("GET", "/", headers={"Host": host, **headers}), settings)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.168.1.20:8710", "http://192.168.1.20:8710"),
        ("hub.example.org", "http://hub.example.org"),
        ("[2001:db8::7]:8710", "http://[2001:db8::7]:8710"),
        ("127.0.0.1:8710", ""),
        ("localhost:8710", ""),
        ("[::1]:8710", ""),
        ("evil;rm -rf", ""),
        ("$(reboot)", ""),
        ("a b", ""),
        ("x" * 300, ""),
        ("", ""),
    ],
)
def test_the_address_is_the_one_that_was_asked(host: str, address: str) -> None:
    assert asked(host, ServerConfig(host="0.0.0.0")) == address


def test_a_public_url_is_the_address() -> None:
    assert asked("other", ServerConfig(public_url="https://hub.example.org/")) == "https://hub.example.org"


async def test_only_a_trusted_proxys_headers_are_believed() -> None:
    for trusted, address in (((), "http://inside:1"), (("127.0.0.1",), "https://hub.example.org")):
        settings = ServerConfig(trusted_proxies=trusted)

        async def answer(request: web.Request, settings: ServerConfig = settings) -> web.Response:
            return web.Response(text=requested_address(request, settings))

        application = web.Application()
        application.router.add_get("/", answer)
        forwarded = {"Host": "inside:1", "X-Forwarded-Host": "hub.example.org, x", "X-Forwarded-Proto": "https"}
        async with (
            TestServer(application) as server,
            ClientSession() as http,
            http.get(server.make_url("/"), headers=forwarded) as said,
        ):
            assert await said.text() == address


def test_a_hub_that_listens_everywhere_tells_its_address_on_the_network() -> None:
    outward = outward_ip()
    shown = shared_address(ServerConfig(host="0.0.0.0"), "http://127.0.0.1:8710")
    if outward is None:
        assert shown == "http://127.0.0.1:8710"
    else:
        assert not ipaddress.ip_address(outward).is_loopback
        assert shown == f"http://{f'[{outward}]' if ':' in outward else outward}:8710"
    assert shared_address(ServerConfig(host="10.1.2.3"), "http://10.1.2.3:1") == "http://10.1.2.3:1"
    public = ServerConfig(host="0.0.0.0", public_url="https://hub.example.org")
    assert shared_address(public, "https://hub.example.org") == "https://hub.example.org"
