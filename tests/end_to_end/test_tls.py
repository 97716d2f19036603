"""A node that trusts the authority of the hub's certificate joins a hub that serves TLS itself, and stays connected
when the certificate is renewed.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.echo_hub.net.certificates import Authority

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_a_node_joins_by_tls_works_and_outlives_a_renewal(
    site: Any, until: Any, books: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files, renewed = authority.server("first"), authority.server("second")
    tls = {"tls_certificate": str(files.certificate), "tls_key": str(files.key)}
    run = await site.make_run(server=tls, training={"steps": 6}, dissemination={"way": "swarm"})
    hub, url = await site.hub(run)
    assert url.startswith("https://127.0.0.1:")
    trusting = {**os.environ, "SSL_CERT_FILE": str(authority.path)}
    node = await site.node(url, "volunteer", env=trusting)
    await until(url, lambda view: view["trained_step"] >= 1, authority.path)
    renewed.certificate.replace(files.certificate)
    renewed.key.replace(files.key)
    await until(url, lambda view: any("was renewed" in event["text"] for event in view["events"]), authority.path)
    view = await until(url, lambda view: view["state"] == "finished", authority.path)
    joined = [event["text"] for event in view["events"] if " joined" in event["text"]]
    assert len(joined) == 1, "it has stayed connected"
    context = ssl.create_default_context(cafile=authority.path)
    async with aiohttp.ClientSession() as http, http.get(f"{url}/leaderboard", ssl=context) as answer:
        assert answer.headers["Strict-Transport-Security"].startswith("max-age=")
        assert "volunteer" in await answer.text()
    assert (await node.end())[0] == 0
    stranger = await site.node(url, "stranger")
    status, said = await stranger.ended()
    assert status != 0 and "certificate is not trusted" in said, said
    assert (await hub.end())[0] == 0


async def test_a_hub_without_its_key_does_not_start(site: Any, tmp_path: Path) -> None:
    files = Authority(tmp_path).server()
    files.key.unlink()
    run = await site.make_run(server={"tls_certificate": str(files.certificate), "tls_key": str(files.key)})
    status, said = await site.command("echo_hub.main", "serve", run)
    assert status == 1 and "server.tls_key" in said and "Traceback" not in said
