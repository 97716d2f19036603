"""The web seed, asked by a plain HTTP client and by a node that no peer can serve."""

import aiohttp
import pytest
from yarl import URL

from echo_shared.artefacts import open_offer, verify_files


@pytest.fixture
async def published(hub, make_adapter):
    offer = await hub.publisher.publish_policy(1, make_adapter(1))
    return open_offer(offer, hub.identity.public_key)


async def get(url: str, *, method: str = "GET", **headers: str) -> tuple[int, bytes, "aiohttp.typedefs.LooseHeaders"]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, URL(url, encoded=True)) as answer,
    ):
        return answer.status, await answer.read(), answer.headers


async def test_serves_whole_files_and_ranges(hub, published, make_adapter) -> None:
    url = f"{hub.url}/artefacts/{published.name}/adapter_model.safetensors"
    whole = (make_adapter(2).parent / "1" / "adapter_model.safetensors").read_bytes()
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
        "{name}/optimizer.pt",
        "{name}/../{name}.manifest.json",
        "{name}/%2e%2e/{name}.manifest.json",
        "{name}/..%2f..%2fhub.key",
        "{name}/..%5c..%5chub.key",
        "{name}/%2fetc%2fpasswd",
        "{name}//etc/passwd",
        "{name}/./adapter_config.json",
        "{name}/adapter_config.json%00",
        "{name}/",
        "{name}",
        "{name}.torrent",
        "../hub.key",
        "%2e%2e/hub.key",
        "..%2fhub.key",
        "no-such-artefact/adapter_config.json",
        "",
    ],
)
async def test_serves_nothing_else(hub, published, path: str) -> None:
    status, body, _ = await get(f"{hub.url}/artefacts/{path.format(name=published.name)}")
    assert status == 404
    assert b"PRIVATE KEY" not in body


async def test_does_not_serve_what_is_only_half_published(hub, published) -> None:
    half = hub.run_dir / "artefacts" / "tiny-run-v000002"
    half.mkdir()
    (half / "adapter_config.json").write_text("{}")
    assert (await get(f"{hub.url}/artefacts/tiny-run-v000002/adapter_config.json"))[0] == 404


async def test_a_node_behind_any_nat_fetches_over_it(hub, published, open_swarm, tmp_path) -> None:
    offer = hub.publisher.offer(1)
    node = await open_swarm(web_seed_after_s=0)
    stats = await node.fetch(offer.torrent, tmp_path / "node", web_seed_url=hub.url + offer.web_seed_path)
    verify_files(published, tmp_path / "node" / published.name)
    assert (stats.swarm_bytes, stats.web_seed_bytes) == (0, published.total_bytes)
