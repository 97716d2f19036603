"""In a real browser, on a phone and in dark mode, public pages show node names that contain HTML as plain text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.board import AboutView
from echo_hub.store.store import Store
from tests.echo_hub.dashboard.public_parts import fill, make_team, open_store, served

TEAM = '<img src=x onerror="alert(3)">'
ABOUT = AboutView(
    description="Sums for <b>all</b>.\n\n" + "word " * 40,
    consent="You agree.",
    contact="x" * 120,
    links={"Paper": "https://example.org/paper"},
    needs_token=True,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


async def test_hostile_names_do_not_run_fetch_or_overflow_on_any_page(
    browser: Any,
    source: Any,
    store: Store,
    guard: Guard,
    hostile_names: tuple[str, ...],
) -> None:
    ids = fill(store, hostile_names, now=time.time())
    make_team(store, TEAM, ids[0], ids[1], now=time.time())
    async with served(source, store, guard, about=ABOUT) as stranger:
        async with stranger.get("/healthz") as answer:
            origin = str(answer.url.origin())
        wrong: list[str] = []
        paths = ["/leaderboard", "/teams", "/about", "/receipts?id=1-0", f"/teams/{quote(TEAM, safe='')}"]
        paths += [f"/nodes/{node_id[:10]}" for node_id in ids]
        for scheme, wide in (("light", 1_280), ("dark", 390)):
            page = await browser.new_page(color_scheme=scheme, viewport={"width": wide, "height": 800})
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("dialog", lambda dialog: wrong.append(dialog.message))
            page.on("request", lambda r: None if r.url.startswith(origin) else wrong.append(r.url))
            for path in paths:
                await page.goto(f"{origin}{path}")
                overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert overflow <= 0, (path, wide)
                assert await page.locator("h1").count() == 1, path
            await page.close()
        assert wrong == []


async def test_one_touch_copies_the_command(browser: Any, source: Any, store: Store, guard: Guard) -> None:
    from playwright.async_api import expect

    async with served(source, store, guard, about=ABOUT) as stranger:
        async with stranger.get("/healthz") as answer:
            origin = str(answer.url.origin())
        context = await browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = await context.new_page()
        await page.goto(f"{origin}/about")
        button = page.locator("button.copy").first
        await button.click()
        await expect(button).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == "echo-node join http://192.168.1.20:8710"
        plain = await browser.new_context(java_script_enabled=False)
        page = await plain.new_page()
        await page.goto(f"{origin}/about")
        await expect(page.locator("button.copy").first).to_be_hidden()


async def test_an_invites_link_puts_its_token_into_the_lines_and_tells_no_server(
    browser: Any,
    source: Any,
    store: Store,
    guard: Guard,
) -> None:
    from playwright.async_api import expect

    token = "p3rs0nal-T0ken_" * 3
    line = f"echo-node join http://192.168.1.20:8710 --token {token}"
    async with served(source, store, guard, about=ABOUT) as stranger:
        async with stranger.get("/healthz") as answer:
            origin = str(answer.url.origin())
        page = await browser.new_page(viewport={"width": 390, "height": 800})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(f"{request.url.partition('#')[0]} {request.headers}"))
        await page.goto(f"{origin}/about#invite={token}")
        await expect(page.locator(".join code").first).to_have_text(line)
        await expect(page.locator("#invited")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert asked and not any(token in one for one in asked)
        await page.close()
        for other in ("", "#invite=short", "#invite=" + quote('"><img src=x onerror=alert(1)>' * 2), "#main"):
            page = await browser.new_page()
            await page.goto(f"{origin}/about{other}")
            await expect(page.locator(".join code").first).to_have_text("echo-node join http://192.168.1.20:8710")
            await expect(page.locator("#invited")).to_be_hidden()
            await page.close()
