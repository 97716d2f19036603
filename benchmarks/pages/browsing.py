"""Chromium on the hub's pages: light, dark and as a phone, with a count of what each page loads."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from benchmarks.harness.books import Amount, fill
from benchmarks.harness.site import Settings, Site, merged, open_site, serving
from echo_hub.store.database import connect

NODES_AT_WORK: Final = 2
STEPS_BEFORE: Final = 8
"""Training steps before the database is filled, so that each table has some genuine rows."""
PATIENCE_S: Final = 300.0
ELSEWHERE: Final = ("nice", "-n", "19")
"""Prefix of the nodes' commands: hub and learner take precedence on the shared processor."""
SETTINGS: Final[Settings] = {
    "run": {"name": "pages"},
    "training": {"steps": 100_000},
    "learner": {"threads": 1, "checkpoint_every": 5},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 16},
    "server": {"port": 0, "shared_memory": False},
}


@contextmanager
def filled_site(scratch: Path, *, nodes: int, rollouts: int, seed: int) -> Iterator[Site]:
    """Serve a hub whose database has this many nodes and rollouts, with two nodes at work."""
    with open_site(scratch, merged(SETTINGS, {"run": {"seed": seed}})) as site:
        _work(site)
        site.wait_for_step(STEPS_BEFORE, within_s=PATIENCE_S)
    engine = connect(site.run.database_url)
    fill(engine, Amount(nodes=nodes, rollouts=rollouts), seed=seed, now=time.time())
    engine.dispose()
    with serving(site.run, scratch) as site:
        _work(site)
        site.wait_for_step(site.newest_step() + 1, within_s=PATIENCE_S)
        yield site


def _work(site: Site) -> None:
    for _ in range(NODES_AT_WORK):
        site.node(["--backend", "torch"], within=ELSEWHERE)


CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-precise-memory-info"),
)
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True, "is_mobile": True},
}
SETTLED_MS: Final = 1_500
"""Time after which a page has loaded completely."""
MOST_SHAPES: Final = 60


def lacks() -> str:
    """Why this machine cannot show pages; empty if it can."""
    return "" if CHROMIUM else "Chromium"


@dataclass(slots=True)
class Loaded:
    """Requests and complaints of one page."""

    origin: str
    urls: list[str] = field(default_factory=list)
    transfer_bytes: int = 0
    """Bytes on the wire, headers included."""
    violations: list[str] = field(default_factory=list)
    """Violations of the content security policy, and other complaints of the browser."""

    @property
    def external(self) -> list[str]:
        """Requests that leave the hub."""
        return [
            url for url in self.urls if urlsplit(url).scheme in ("http", "https") and not url.startswith(self.origin)
        ]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(browser: Browser, site: Site, mode: str, *, operator: bool = True) -> AsyncIterator[BrowserContext]:
    """Open a fresh browser profile, with the operator logged in or without a login."""
    context = await browser.new_context(**MODES[mode])
    try:
        if operator:
            await context.request.get(f"{site.url}/?token={site.token}")
        yield context
    finally:
        await context.close()


async def counted(page: Page, site: Site) -> Loaded:
    """Count what the page loads from now on."""
    loaded, protocol = Loaded(site.url), await page.context.new_cdp_session(page)
    await protocol.send("Network.enable")

    def add(event: dict[str, Any]) -> None:
        loaded.transfer_bytes += event["encodedDataLength"]

    protocol.on("Network.loadingFinished", add)
    protocol.on("Network.dataReceived", lambda event: None)
    protocol.on("Network.requestWillBeSent", lambda event: loaded.urls.append(event["request"]["url"]))

    def heed(kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            loaded.violations.append(text)

    page.on("console", lambda message: heed(message.type, message.text))
    page.on("pageerror", lambda error: heed("error", str(error)))
    return loaded


def shape(path: str) -> str:
    """Replace numbers and ids of a path by a star: /rollouts/17 becomes /rollouts/*."""
    parts = path.partition("?")[0].split("/")
    return "/".join("*" if re.fullmatch(r"[0-9a-f-]*[0-9][0-9a-f-]*", part) else part for part in parts)


async def pages_of(context: BrowserContext, site: Site) -> dict[str, str]:
    """Follow links, and return a path of each shape. The login page is added."""
    found, waiting, asked = {"/login": "/login"}, ["/", "/leaderboard"], set[str]()
    page = await context.new_page()
    while waiting and len(found) < MOST_SHAPES:
        path = waiting.pop(0)
        if shape(path) in asked:
            continue
        asked.add(shape(path))
        answer = await context.request.get(site.url + path)
        if not answer.ok or "text/html" not in answer.headers.get("content-type", ""):
            continue
        found[shape(path)] = path
        await page.goto(site.url + path)
        links = await page.evaluate("() => [...document.querySelectorAll('a[href]')].map((one) => one.href)")
        waiting += [link.removeprefix(site.url).partition("#")[0] for link in links if link.startswith(f"{site.url}/")]
    await page.close()
    return found
