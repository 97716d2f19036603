"""The web seed serves files by HTTP to nodes that no peer can serve; here to such a node and to a plain client."""

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net import artefact_routes
from echo_hub.net.server import Server
from echo_shared.errors import RefusedError

MEMBER, BANNED = 1, 2


@pytest.fixture
async def published(hub, make_adapter):
    await hub.publisher.publish_policy(1, make_adapter(1))
    hub.tracker.bar({f"{BANNED:020x}"})
    return hub.publisher.carrier(1)


async def get(url: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes, "aiohttp.typedefs.LooseHeaders"]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, URL(url, encoded=True)) as answer,
    ):
        return answer.status, await answer.read(), answer.headers


def seed_url(hub, node_number: int = MEMBER) -> str:
    """Return the web seed's address for this node, with a slash at the end."""
    return hub.url + hub.offer(1, node_number=node_number).web_seed_path


async def test_serves_whole_files_and_ranges(hub, published) -> None:
    url = f"{seed_url(hub)}{published.directory.name}/payload.sealed"
    whole = (published.directory / "payload.sealed").read_bytes()
    assert (await get(url))[:2] == (200, whole)
    status, body, headers = await get(url, Range="bytes=500-1499")
    assert (status, body) == (206, whole[500:1500])
    assert headers["Content-Range"] == f"bytes 500-1499/{len(whole)}"
    assert (await get(url, Range=f"bytes={len(whole) - 3}-"))[:2] == (206, whole[-3:])
    assert (await get(url, Range=f"bytes={len(whole)}-"))[0] == 416
    status, body, headers = await get(url, method="HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(whole)))


@pytest.mark.parametrize(
    "path",
    [
        "{name}.k/adapter_config.json",
        "{name}/adapter_config.json",
        "{name}.k/optimizer.pt",
        "{name}.k/../{name}.k.manifest.json",
        "{name}.k/%2e%2e/{name}.k.manifest.json",
        "{name}.k/..%2f..%2fhub.key",
        "{name}.k/..%2f..%2frun_keys.json",
        "{name}.k/..%5c..%5chub.key",
        "{name}.k/%2fetc%2fpasswd",
        "{name}.k//etc/passwd",
        "{name}.k/./payload.sealed",
        "{name}.k/payload.sealed%00",
        "{name}.k/",
        "{name}.k",
        "{name}.k.torrent",
        "../hub.key",
        "%2e%2e/hub.key",
        "..%2fhub.key",
        "no-such-artefact/payload.sealed",
        "",
    ],
)
async def test_other_paths_are_not_served(hub, published, path: str) -> None:
    status, body, _ = await get(seed_url(hub) + path.format(name=published.manifest.name))
    assert status in (403, 404)  # A path that climbs out of the directory has no valid passkey.
    assert b"PRIVATE KEY" not in body and b"keys" not in body


async def test_only_members_are_served(hub, published) -> None:
    file = f"{published.directory.name}/payload.sealed"
    passkey = hub.tracker.passkey(f"{MEMBER:020x}")
    for wrong in ("x", "0" * len(passkey), passkey[:-1], passkey + "0", f"{3:020x}{passkey[20:]}", "%00", "%c3%a9%ff"):
        status, body, _ = await get(f"{hub.url}/artefacts/{wrong}/{file}")
        assert (status, b"passkey is unknown" in body) == (403, True), wrong
    assert (await get(f"{hub.url}/artefacts/{file}"))[0] in (403, 404)


async def test_a_banned_node_is_refused_until_it_is_unbanned(hub, published) -> None:
    url = f"{seed_url(hub, BANNED)}{published.directory.name}/payload.sealed"
    status, body, _ = await get(url)
    assert (status, b"banned" in body) == (403, True)
    hub.tracker.bar(())
    assert (await get(url))[0] == 200


async def test_half_published_artefacts_are_not_served(hub, published) -> None:
    half = hub.run_dir / "artefacts" / "tiny-run-v000002.k"
    half.mkdir()
    (half / "payload.sealed").write_text("{}")
    assert (await get(f"{seed_url(hub)}tiny-run-v000002.k/payload.sealed"))[0] == 404


async def test_a_node_behind_any_nat_fetches_over_it(hub, published, open_swarm, tmp_path) -> None:
    node = await open_swarm(web_seed_after_s=0)
    stats = await node.fetch(published.torrent, tmp_path / "node", web_seed_url=seed_url(hub))
    hub.read(published.manifest, tmp_path / "node" / published.directory.name, tmp_path / "read")
    assert (stats.swarm_bytes, stats.web_seed_bytes) == (0, published.total_bytes)


class OneEach:
    """Admits one request in total, and refuses all others."""

    def __init__(self) -> None:
        self.vouched: list[str] = []

    def vouch(self, request: web.Request, node_id: str) -> None:
        self.vouched.append(node_id)
        if len(self.vouched) > 1:
            raise RefusedError("Too many connections.")


async def test_a_node_with_too_many_connections_is_told_to_wait(hub, published) -> None:
    vouches = OneEach()
    server = Server(ServerConfig(port=0))
    await server.open(artefact_routes.routes(hub.publisher, hub.tracker, vouches))
    path = seed_url(hub).removeprefix(hub.url) + f"{published.directory.name}/payload.sealed"
    try:
        assert [(await get(server.url + path))[0] for _ in range(2)] == [200, 429]
    finally:
        await server.close()
    assert vouches.vouched == [f"{MEMBER:020x}"] * 2
