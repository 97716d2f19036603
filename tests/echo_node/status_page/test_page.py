"""The node's status page on the real control server: outsiders get nothing, and the owner uses it in a real browser."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from echo_node.condition import described
from echo_node.host.control import ask, control_server
from echo_node.panel import rows
from echo_node.status_page import page as page_module
from echo_node.status_page.page import StatusPage, Verb
from echo_shared.errors import ConfigError
from tests.echo_node.test_panel import SNAPSHOT, TOTALS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '<img src=x onerror="alert(1)"> [red]'


class Site:
    """A node's status page. The commands that it passes to the node are recorded."""

    def __init__(self) -> None:
        self.snapshot = replace(
            SNAPSHOT,
            run_name=HOSTILE,
            totals=TOTALS,
            page="http://127.0.0.1:8710/leaderboard?node=abc",
            lease_tokens=900,
            lease_most_tokens=3_072,
            token_rates=tuple(float(200 + 37 * (n * n % 23)) for n in range(30)),
        )
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.news = asyncio.Event()
        self.file = Path()
        self.page = StatusPage(view=self._view, verbs=self.verbs)

    @property
    def verbs(self) -> dict[str, Verb]:
        return {"pause": self._pause, "resume": self._resume, "finish": self._finish, "stop": self._finish}

    def _view(self) -> Mapping[str, Any]:
        shown = described(self.snapshot, is_finishing=("finish", {}) in self.told)
        return {"snapshot": asdict(shown), "rows": rows(shown)}

    def _note(self, verb: str, arguments: Mapping[str, Any]) -> None:
        self.told.append((verb, arguments))
        self.news.set()

    def _pause(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if arguments.get("length") == "soon":
            raise ConfigError("This is not a length of time.", got="soon")
        self._note("pause", arguments)
        self.snapshot = replace(self.snapshot, activity="paused", holds={"paused": "Paused by you until 14:00."})
        return {}

    def _resume(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._note("resume", arguments)
        self.snapshot = replace(self.snapshot, activity="sampling", holds={})
        return {}

    def _finish(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._note("finish", arguments)
        return {}

    async def until(self, verb: str) -> Mapping[str, Any]:
        async with asyncio.timeout(60):
            while verb not in dict(self.told):
                self.news.clear()
                await self.news.wait()
        return dict(self.told)[verb]

    @property
    def port(self) -> int:
        return int(json.loads(self.file.read_text())["port"])

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def path(self) -> str:
        return self.page.invite().removeprefix(f"http://{self.host}").partition("enter")[0]

    async def get(
        self, path: str, *, host: str | None = None, headers: str = "", method: str = "GET"
    ) -> tuple[int, str]:
        """Return status and content of the answer to a request without credentials."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host or self.host}\r\n{headers}\r\n".encode())
        async with asyncio.timeout(60):
            answer = (await reader.read()).decode()
        writer.close()
        return int(answer.split(" ", 2)[1]), answer

    async def enter(self) -> str:
        """Return the Cookie header of a browser with access to the page."""
        url = self.page.invite()
        status, answer = await self.get(url.removeprefix(f"http://{self.host}"))
        assert status == 200 and 'content="0;url=./"' in answer
        (cookie,) = (line for line in answer.split("\r\n") if line.startswith("Set-Cookie: "))
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        return "Cookie: " + cookie.removeprefix("Set-Cookie: ").partition(";")[0] + "\r\n"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site()
    site.file = tmp_path / "control.json"
    verbs = {**site.verbs, "page": lambda _: {"url": site.page.invite()}}
    async with control_server(site.file, verbs, site.page):
        yield site


@pytest.mark.parametrize("name", ["", "page.html", "page.css", "page.js", "live", "enter", "enter?code=guess", "../x"])
async def test_without_a_session_nothing_is_served(site: Site, name: str) -> None:
    status, answer = await site.get(site.path + name)
    assert status == 403 and "echo-node page" in answer
    assert "sampling" not in answer


async def test_a_browser_with_access_gets_only_the_page(site: Site) -> None:
    cookie, path = await site.enter(), site.path
    for name, kind in (
        ("", "text/html"),
        ("page.html", "text/html"),
        ("page.css", "text/css"),
        ("page.js", "text/java"),
    ):
        status, answer = await site.get(path + name, headers=cookie)
        assert status == 200 and f"Content-Type: {kind}" in answer
    for name in ("page.py", "../page.py", "%2e%2e/page.py", "static", "favicon.ico"):
        assert (await site.get(path + name, headers=cookie))[0] == 404
    for elsewhere in ("/", "/page.html", path.upper()):
        assert (await site.get(elsewhere, headers=cookie))[0] == 426, "the control socket expects a websocket there"


async def test_a_code_opens_the_page_once(site: Site) -> None:
    url = (await ask(site.file, "page"))["url"].removeprefix(f"http://{site.host}")
    assert (await site.get(url))[0] == 200
    status, answer = await site.get(url)
    assert status == 403 and "Set-Cookie" not in answer


@pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1", "127.0.0.1:1", "[::1]"])
async def test_a_name_that_a_stranger_bound_to_loopback_is_not_this_server(site: Site, host: str) -> None:
    cookie = await site.enter()
    assert (await site.get(site.path, host=host, headers=cookie))[0] == 421
    url = site.page.invite().removeprefix(f"http://{site.host}")
    assert (await site.get(url, host=host))[0] == 421
    twice = f"{cookie}Host: {site.host}\r\n"
    assert (await site.get(site.path, host=host, headers=twice))[0] == 421


async def test_no_answer_lets_the_browser_load_other_resources(site: Site) -> None:
    cookie = await site.enter()
    for headers in ("", cookie):
        _, answer = await site.get(site.path, headers=headers)
        policy = next(line for line in answer.split("\r\n") if line.startswith("Content-Security-Policy: "))
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert f"connect-src ws://{site.host};" in policy
        for line in ("X-Frame-Options: DENY", "Cache-Control: no-store", "Referrer-Policy: no-referrer"):
            assert line in answer


async def test_only_get_requests_are_answered(site: Site) -> None:
    cookie = await site.enter()
    status, _ = await site.get(site.path, headers=f"{cookie}Origin: http://{site.host}\r\n", method="POST")
    assert status in (400, 405)
    assert site.told == []


def live(site: Site, cookie: str, **options: Any) -> Any:
    headers = {"Cookie": cookie.removeprefix("Cookie: ").strip()} if cookie else {}
    options = {"origin": f"http://{site.host}", **options}
    return connect(f"ws://{site.host}{site.path}live", proxy=None, additional_headers=headers, **options)


@pytest.mark.parametrize("origin", [None, "null", "http://localhost", "https://evil.example", "http://127.0.0.1:1"])
async def test_only_the_page_opens_its_websocket(site: Site, origin: Any) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        await live(site, await site.enter(), origin=origin)
    with pytest.raises(InvalidStatus, match="403"):
        await live(site, "")


async def test_the_websocket_sends_changes_and_accepts_the_pages_verbs(site: Site) -> None:
    async with live(site, await site.enter()) as socket:
        assert json.loads(await socket.recv())["view"]["snapshot"]["state"] == "sampling"
        await socket.send(json.dumps({"verb": "pause", "arguments": {"length": "1h"}}))
        assert json.loads(await socket.recv()) == {"done": "pause"}
        assert json.loads(await socket.recv())["view"]["snapshot"]["state"] == "paused"
        assert site.told == [("pause", {"length": "1h"})]
        for request in ('{"verb": "stop"}', '{"verb": "page"}', "[]", "", '{"verb": "pause", "arguments": 1}'):
            await socket.send(request)
            assert "refused" in json.loads(await socket.recv())
        await socket.send(json.dumps({"verb": "pause", "arguments": {"length": "soon"}}))
        assert "not a length of time" in json.loads(await socket.recv())["refused"]
    assert len(site.told) == 1


async def test_the_page_shows_changes_by_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "EVERY_S", 0.01)
    async with live(site, await site.enter()) as socket:
        await socket.recv()
        site.snapshot = replace(site.snapshot, policy_version=13)
        assert json.loads(await socket.recv())["view"]["snapshot"]["policy_version"] == 13


async def test_a_request_that_is_too_long_ends_the_websocket_alone(site: Site) -> None:
    async with live(site, await site.enter()) as socket:
        await socket.recv()
        with pytest.raises(ConnectionClosed):
            await socket.send("x" * 100_000)
            while True:
                await socket.recv()
    assert "url" in await ask(site.file, "page")


async def test_the_control_socket_takes_no_web_page_either(site: Site) -> None:
    with pytest.raises((InvalidStatus, InvalidMessage), match="403"):
        await connect(f"ws://{site.host}/", proxy=None, origin=f"http://{site.host}")  # type: ignore[arg-type]


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.async_api import async_playwright

    async with AsyncExitStack() as stack:
        playwright = await stack.enter_async_context(async_playwright())
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        stack.push_async_callback(launched.close)
        yield launched


async def test_the_owner_pauses_resumes_and_finishes_in_a_real_browser(
    site: Site, browser: Any, tmp_path: Path
) -> None:
    from playwright.async_api import expect

    from echo_node.status_page.browser import _PAGE

    page = await browser.new_page(viewport={"width": 900, "height": 900})
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    lead = tmp_path / "lead.html"
    lead.write_text(_PAGE.format(url=site.page.invite()))
    await page.goto(lead.as_uri())
    await expect(page).to_have_url(f"http://{site.host}{site.path}")
    state = page.locator("#state")
    await expect(state).to_have_text("sampling")
    await expect(page.locator("#node")).to_have_text(f"a node lends this computer to {HOSTILE}")
    await expect(page.locator("#rows")).to_contain_text("39,544 trained")
    assert await page.locator("img").count() == 0
    assert await page.evaluate("document.cookie") == ""
    (cookie,) = await page.context.cookies(page.url)
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", site.path)
    # The page's buttons must work by the keyboard alone.
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Pause for an hour")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(state).to_have_text("paused")
    await expect(page.locator("#reason")).to_have_text("Paused by you until 14:00.")
    assert await site.until("pause") == {"length": "1h"}
    await page.get_by_role("button", name="Resume").click()
    await expect(state).to_have_text("sampling")
    finish = page.locator("#actions").get_by_role("button", name="Finish and stop")
    await finish.click()
    await page.keyboard.press("Escape")
    await expect(page.locator("#sure")).to_be_hidden()
    assert "finish" not in dict(site.told)
    await finish.click()
    await page.locator("#sure").get_by_role("button", name="Finish and stop").click()
    await site.until("finish")
    await expect(state).to_have_text("finishing")
    await expect(finish).to_be_disabled()
    assert wrong == []
    assert all(url.startswith((f"http://{site.host}{site.path}", lead.as_uri())) for url in asked), asked


def device(name: str, **holds: str) -> Mapping[str, Any]:
    values: dict[str, Any] = {"is_chosen": True, "title": HOSTILE, "backend": "torch", "precision": "", "problem": ""}
    figures = {"state": "paused" if holds else "waiting", "width": 16, "rollouts": 0, "tokens_per_s": 0.0}
    return {"name": name, "holds": holds, **values, **figures}


async def test_the_owner_pauses_one_device_in_a_real_browser(site: Site, browser: Any) -> None:
    from playwright.async_api import expect

    page = await browser.new_page(viewport={"width": 320, "height": 640})
    site.snapshot = replace(site.snapshot, devices=(device("cuda:0"), device("cuda:1")))
    await page.goto(site.page.invite())
    rows = page.locator("#devices li")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text(f"cuda:1 ({HOSTILE}): waiting, 0 rollouts, at most 16 at once")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.get_by_role("button", name="Pause cuda:1").click()
    assert await site.until("pause") == {"device": "cuda:1"}
    site.snapshot = replace(
        site.snapshot, devices=(device("cuda:0"), device("cuda:1", paused="You have paused cuda:1.")), holds={}
    )
    await expect(rows.nth(1)).to_contain_text("paused. You have paused cuda:1.")
    await page.get_by_role("button", name="Resume cuda:1").click()
    assert await site.until("resume") == {"device": "cuda:1"}
    assert await page.locator("img").count() == 0
    site.snapshot = replace(site.snapshot, devices=())
    await expect(page.locator("#devices")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_a_phone(site: Site, browser: Any, scheme: Any) -> None:
    from playwright.async_api import expect

    page = await browser.new_page(viewport={"width": 320, "height": 640}, color_scheme=scheme)
    site.snapshot = replace(site.snapshot, name="n" * 64, fetching={"Policy version 13": (1, 3)})
    await page.goto(site.page.invite())
    await expect(page.locator("#state")).to_have_text("sampling")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320


async def test_another_sites_page_gets_nothing(site: Site, browser: Any) -> None:
    """A web page served from another port of this host gets nothing, even in the owner's own browser."""
    from playwright.async_api import expect

    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(site.page.invite())
    await expect(page.locator("#state")).to_have_text("sampling")
    cookies: list[str] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        cookies.append(request)
        body = b"<!doctype html><title>other</title>"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: ")
        writer.write(str(len(body)).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        stranger = await context.new_page()
        await stranger.goto(f"http://127.0.0.1:{port}/")
        script = """async (address) => {
            const opened = new Promise((done) => {
                const socket = new WebSocket("ws" + address.slice(4) + "live");
                socket.onopen = () => done("opened");
                socket.onerror = () => done("refused");
            });
            const read = await fetch(address, {credentials: "include"}).then((a) => a.text(), () => "refused");
            return [await opened, read];
        }"""
        assert await stranger.evaluate(script, f"http://{site.host}{site.path}") == ["refused", "refused"]
    assert not any("echo_page" in request for request in cookies), "cookies go to every port, but not to every path"
    assert site.told == []
