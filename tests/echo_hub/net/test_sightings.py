"""Sightings (the hub's signed statements about public addresses): only this hub makes them, each for one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from echo_hub.net import sightings as sightings_module
from echo_hub.net.address_rate import BURST_S
from echo_hub.net.sightings import PER_S_OF_NODE, UNKNOWN_PORT, VALID_S, Sightings, routes
from echo_hub.net.tracker import Tracker
from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity

HUB = Identity.generate()
NODE, OTHER = f"{1:020x}", f"{2:020x}"
NOW = 1_000.0


@pytest.fixture
def sightings() -> Sightings:
    return Sightings(HUB)


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_a_sighting_is_read_as_it_was_made(sightings: Sightings, host: str) -> None:
    said = sightings.sign(NODE, host, 40_000, now=NOW)
    assert said.startswith(f"{host} 40000 ") and len(said) <= 200
    assert Sightings(HUB).read(NODE, said, now=NOW + VALID_S) == (host, 40_000)


@pytest.mark.parametrize("change", [("203.0.113.7", "203.0.113.8"), (" 40000 ", " 40001 "), (" 1060 ", " 9060 ")])
def test_a_changed_sighting_is_refused(sightings: Sightings, change: tuple[str, str]) -> None:
    said = sightings.sign(NODE, "203.0.113.7", 40_000, now=NOW)
    assert change[0] in said
    with pytest.raises(RemoteProtocolError):
        sightings.read(NODE, said.replace(*change), now=NOW)


@pytest.mark.parametrize("said", ["", " ", "203.0.113.7 40000 1060", "a b c d", "é 1 2 3", "1 " * 90, "\udcff 1 1 1"])
def test_nonsense_is_refused(sightings: Sightings, said: str) -> None:
    with pytest.raises(RemoteProtocolError):
        sightings.read(NODE, said, now=NOW)


def test_a_sighting_serves_one_node_of_one_hub_for_a_while(sightings: Sightings) -> None:
    said = sightings.sign(NODE, "203.0.113.7", 40_000, now=NOW)
    for reader, node_id, now in (
        (sightings, OTHER, NOW),
        (Sightings(Identity.generate()), NODE, NOW),
        (sightings, NODE, NOW + VALID_S + 1),
    ):
        with pytest.raises(RemoteProtocolError):
            reader.read(node_id, said, now=now)


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    tracker = Tracker(HUB)
    application = web.Application()
    application.add_routes(routes(Sightings(HUB), tracker, trusted_proxies=["127.0.0.2"]))
    async with TestClient(TestServer(application)) as client:
        yield client


async def test_the_hub_tells_a_node_from_where_it_connects(client: TestClient, sightings: Sightings) -> None:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    path = f"/sighting/{Tracker(HUB).passkey(NODE)}"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n".encode())
    said = (await reader.read()).decode().splitlines()[-1]
    assert sightings.read(NODE, said, now=0) == writer.get_extra_info("sockname")
    writer.close()


async def test_only_nodes_that_have_joined_are_told(client: TestClient) -> None:
    for passkey in (Tracker(Identity.generate()).passkey(NODE), NODE, "x"):
        assert (await client.get(f"/sighting/{passkey}")).status == 403


async def test_a_proxy_names_the_address_but_not_the_port(sightings: Sightings) -> None:
    application = web.Application()
    application.add_routes(routes(Sightings(HUB), Tracker(HUB), trusted_proxies=["127.0.0.1"]))
    async with TestClient(TestServer(application)) as client:
        path, forwarded = f"/sighting/{Tracker(HUB).passkey(NODE)}", {"X-Forwarded-For": "203.0.113.9"}
        said = await (await client.get(path, headers=forwarded)).text()
    assert sightings.read(NODE, said, now=0) == ("203.0.113.9", UNKNOWN_PORT)


async def test_one_node_gets_only_so_many(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings_module, "time", SimpleNamespace(monotonic=lambda: NOW, time=lambda: NOW))
    keys = [Tracker(HUB).passkey(node_id) for node_id in (NODE, OTHER)]
    most = int(PER_S_OF_NODE * BURST_S)
    found = [(await client.get(f"/sighting/{keys[0]}")).status for _ in range(most + 20)]
    assert found.count(200) <= most and found[-1] == 429
    assert (await client.get(f"/sighting/{keys[1]}")).status == 200
