"""Nodes, files and pages work through nginx and Caddy in front of a hub, configured as docs/operator/public.md says."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo_hub.net.tracker import Tracker
from echo_shared.signing import key_file
from tests.echo_hub.net.certificates import Authority

pytestmark = pytest.mark.timeout(600)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operator" / "public.md"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port: int = taken.getsockname()[1]
        return port


class Proxy:
    """A reverse proxy with its files in `root`. Only addresses and paths differ from the documented configuration."""

    program = ""

    def __init__(self, root: Path, *, hub_port: int) -> None:
        root.mkdir()
        self.root = root
        self.port = free_port()
        self.files = Authority(root).server()
        self.url = f"https://127.0.0.1:{self.port}"
        (shown,) = re.findall(rf"```{self.program}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
        for there, here in {"127.0.0.1:8710": f"127.0.0.1:{hub_port}", **self.places()}.items():
            assert there in shown
            shown = shown.replace(there, here)
        (root / "echo.conf").write_text(shown)

    def places(self) -> dict[str, str]:
        raise NotImplementedError

    def command(self) -> tuple[str, ...]:
        raise NotImplementedError

    def logged(self) -> str:
        return "".join(path.read_text() for path in self.root.glob("*.log"))

    async def is_up(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.url}/healthz") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorError:
            return False


class Nginx(Proxy):
    program = "nginx"

    def places(self) -> dict[str, str]:
        folders = "".join(
            f"{kind}_temp_path {self.root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
        )
        (self.root / "nginx.conf").write_text(
            f"daemon off; pid {self.root}/nginx.pid; events {{}}\n"
            f"http {{ {folders}\ninclude {self.root}/echo.conf; }}\n"
        )
        return {
            "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "/etc/letsencrypt/live/hub.example.org/fullchain.pem": str(self.files.certificate),
            "/etc/letsencrypt/live/hub.example.org/privkey.pem": str(self.files.key),
            "/var/log/nginx/": f"{self.root}/",
        }

    def command(self) -> tuple[str, ...]:
        return ("nginx", "-p", str(self.root), "-e", str(self.root / "start.log"), "-c", str(self.root / "nginx.conf"))


class Caddy(Proxy):
    """Caddy with a given certificate, because no certificate authority is reachable here, and without its second port,
    which redirects HTTP.
    """

    program = "caddy"

    def places(self) -> dict[str, str]:
        return {
            "{\n    log {\n": "{\n    admin off\n    auto_https disable_redirects\n"
            f"    log {{\n        output file {self.root}/caddy.log\n",
            "hub.example.org {": f"{self.url} {{\n    tls {self.files.certificate} {self.files.key}\n"
            f"    bind 127.0.0.1",
        }

    def command(self) -> tuple[str, ...]:
        return ("caddy", "run", "--adapter", "caddyfile", "--config", str(self.root / "echo.conf"))


def needs(kind: type[Proxy]) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(kind.program) is None, reason=f"no {kind.program} on this machine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(Nginx, "swarm", marks=needs(Nginx)),
        pytest.param(Caddy, "web_seed", marks=needs(Caddy)),
    ],
)
async def test_nodes_files_and_pages_by_way_of_a_proxy(
    site: Any, until: Any, operator: Any, books: Any, tmp_path: Path, kind: type[Proxy], way: str
) -> None:
    """Nodes fetch by web seed through one proxy, and by swarm through the other (`way`). The test itself requests files
    in the other way.
    """
    hub_port = free_port()
    proxy = kind(tmp_path / kind.program, hub_port=hub_port)
    behind = {"port": hub_port, "public_url": proxy.url, "trusted_proxies": ["127.0.0.1"]}
    run = await site.make_run(server=behind, dissemination={"way": way})
    hub = await site.start("echo_hub.main", "serve", run)
    await hub.printed(rf"Dashboard +{proxy.url}/\?token=")
    operator(proxy.url, run)
    running = await site.program(*proxy.command(), env={**os.environ, "HOME": str(proxy.root)})
    context = ssl.create_default_context(cafile=proxy.files.authority)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
        while not await proxy.is_up(http):
            assert running.process.returncode is None
    trusting = {**os.environ, "SSL_CERT_FILE": str(proxy.files.authority)}
    node = await site.node(proxy.url, "volunteer", env=trusting)
    view = await until(proxy.url, lambda view: view["state"] == "finished", proxy.files.authority)
    assert view["join_command"] == f"echo-node join {proxy.url}"
    assert (await node.end())[0] == 0

    ((node_id,),) = books(run).execute("SELECT node_id FROM nodes WHERE first_seen > 0").fetchall()
    passkey = Tracker(key_file.load(run / "hub.key")).passkey(node_id)
    # Another loopback address stands for another host.
    elsewhere = aiohttp.TCPConnector(ssl=context, local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(proxy.url, connector=elsewhere) as http:
        async with http.get(f"/announce/{passkey}?info_hash={'x' * 20}&port=6881&left=1") as answer:
            assert b"not published" in await answer.read(), "the node is known, the torrent is not"
        await check_web_seed(http, run, passkey)
        # The proxy must not pass on headers in which a client claims another address.
        own = {"Origin": proxy.url, "X-Forwarded-For": "192.0.2.9"}
        async with http.post("/login", data={"secret": "wrong"}, headers=own) as answer:
            assert answer.status == 403
        async with http.get("/", headers={"Accept": "text/html"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/login")
            assert answer.headers["Strict-Transport-Security"] == "max-age=15552000"
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    await until(
        proxy.url,
        lambda view: any("login from 127.0.0.2 was refused" in event["text"] for event in view["events"]),
        proxy.files.authority,
    )
    token = operator(proxy.url)["Authorization"].removeprefix("Bearer ")
    if kind is Nginx:
        await look(proxy.url, token)
    assert (await hub.end())[0] == 0
    async with (
        aiohttp.ClientSession(proxy.url, connector=aiohttp.TCPConnector(ssl=context)) as http,
        http.get(f"/announce/{passkey}?info_hash={'x' * 20}&token={token}") as answer,
    ):
        assert answer.status == 502, "a failure, which is logged"
    _, said = await running.end()
    logged = proxy.logged() + said
    assert passkey not in logged and token not in logged
    if kind is Nginx:
        assert "/announce/... 200" in logged and "/artefacts/... 206" in logged and " /login 403" in logged
        assert not any((proxy.root / "proxy").rglob("*")), "no file was copied to the proxy's disk"
    else:
        assert "connection refused" in logged, "the error is still reported"


async def check_web_seed(http: aiohttp.ClientSession, run: Path, passkey: str) -> None:
    file = max(
        (path for path in (run / "artefacts").glob("*/*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    body = file.read_bytes()
    path = f"/artefacts/{passkey}/{file.parent.name}/{file.name}"
    async with http.get(path) as answer:
        assert answer.status == 200 and await answer.read() == body
    async with http.get(path, headers={"Range": "bytes=1000-1999"}) as answer:
        assert answer.status == 206 and await answer.read() == body[1000:2000]


async def look(url: str, token: str) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    from playwright.async_api import async_playwright, expect

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = await browser.new_page(ignore_https_errors=True)
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        await page.goto(f"{url}/")
        await expect(page).to_have_url(f"{url}/login")
        await page.locator("#secret").fill(token)
        await page.get_by_role("button", name="Log in").click()
        await expect(page).to_have_url(f"{url}/")
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("#chart-reward canvas")).to_be_visible()
        (cookie,) = await page.context.cookies()
        assert cookie["name"].startswith("__Host-echo-") and cookie["secure"]
        await page.get_by_role("button", name="Log out").click()
        await expect(page).to_have_url(f"{url}/login")
        await browser.close()
    assert wrong == []
