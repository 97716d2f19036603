"""The operator's real browser visits a hostile server on another port of the hub's host. That server receives the
session's cookie, but must not be able to change anything with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from echo_hub.dashboard.access.guard import KEY, Guard

PAGE = """<!doctype html><title>evil</title>
<form id="form" method="post" action="{hub}/actions/pause" target="frame"><input name="confirmed" value="yes"></form>
<form id="gift" method="post" action="{hub}/actions/token" target="frame"><input name="name" value="evil"></form>
<iframe name="frame"></iframe>
<script>
async function attack() {{
  const found = {{ stored: localStorage.length, pages: [] }};
  for (const mode of ["cors", "no-cors"]) {{
    for (const path of ["/actions", "/actions/pause", "/api/v1/actions/pause"]) {{
      try {{
        const sent = {{ method: "POST", body: new URLSearchParams({{ confirmed: "yes" }}) }};
        const asked = path === "/actions" ? {{}} : sent;
        const answer = await fetch("{hub}" + path, {{ mode, credentials: "include", ...asked }});
        found.pages.push(await answer.text());
      }} catch (error) {{ found.pages.push(""); }}
    }}
  }}
  for (const id of ["form", "gift"]) {{
    document.getElementById(id).submit();
    await new Promise((done) => document.querySelector("iframe").addEventListener("load", done, {{ once: true }}));
  }}
  return found;
}}
</script>"""


@dataclass
class Evil:
    """A hostile server on the hub's host, which keeps the request headers of browsers that visit it."""

    url: str = ""
    cookies: list[str] = field(default_factory=list)


@pytest.fixture
async def hub(open_hub: Any, source: Any, desk: Any) -> ClientSession:
    opened: ClientSession = await open_hub(source, token="", desk=desk)
    return opened


def address(hub: ClientSession) -> str:
    return str(hub._base_url).rstrip("/")


@pytest.fixture
async def evil(hub: ClientSession) -> AsyncIterator[Evil]:
    seen = Evil()

    async def serve(request: web.Request) -> web.Response:
        seen.cookies.append(request.headers.get("Cookie", ""))
        return web.Response(text=PAGE.format(hub=address(hub)), content_type="text/html")

    application = web.Application()
    application.add_routes([web.get("/", serve)])
    async with TestServer(application) as server:
        seen.url = str(server.make_url("/"))
        yield seen


async def test_another_port_of_the_host_gets_the_cookie_and_changes_nothing(
    browser: Any,
    hub: ClientSession,
    evil: Evil,
    guard: Guard,
    desk: Any,
) -> None:
    from playwright.async_api import expect

    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{address(hub)}/?token={guard.credentials.token}")
    await expect(page).to_have_url(f"{address(hub)}/")
    await page.goto(evil.url)
    assert evil.cookies[-1].startswith("echo-test="), "cookies do not depend on ports"
    found = await page.evaluate("attack()")
    assert found["stored"] == 0 and not any("Actions" in text for text in found["pages"])

    stolen = {
        "Cookie": evil.cookies[-1],
        "Origin": address(hub),
        "Sec-Fetch-Site": "same-origin",
        "Accept": "text/html",
    }
    async with hub.get("/actions", headers=stolen) as answer:
        assert f'name="{KEY}" value=""' in await answer.text()
    for action in ("pause", "token", "invite"):
        async with hub.post(f"/actions/{action}", headers=stolen, data={"name": "evil", "confirmed": "yes"}) as answer:
            assert answer.status == 403
    assert await desk.log(limit=9, before=None) == [] and await desk.tokens() == []

    await page.goto(f"{address(hub)}/actions")
    await page.locator("#do-pause").get_by_role("button").click()
    await page.get_by_role("button", name="Yes, do it").click()
    await expect(page.locator("#log tbody tr").first.locator("td").first).to_have_text("pause")
    second = await context.new_page()
    await second.goto(f"{address(hub)}/actions")
    await second.locator("#do-resume").get_by_role("button").click()
    await expect(second.locator("#log tbody tr").first.locator("td").first).to_have_text("resume")


async def test_a_browser_that_has_lost_its_key_is_told_to_log_in_again(
    browser: Any,
    hub: ClientSession,
    guard: Guard,
) -> None:
    from playwright.async_api import expect

    page = await browser.new_page()
    await page.goto(f"{address(hub)}/?token={guard.credentials.token}")
    await expect(page).to_have_url(f"{address(hub)}/")
    await page.evaluate("localStorage.clear()")
    await page.goto(f"{address(hub)}/actions")
    await page.locator("#do-publish").get_by_role("button").click()
    await expect(page.get_by_role("alert")).to_contain_text("Log in again")
    await page.get_by_role("link", name="Log in").click()
    await page.locator("#secret").fill(guard.credentials.token)
    await page.get_by_role("button", name="Log in").click()
    await expect(page).to_have_url(f"{address(hub)}/")
    await page.goto(f"{address(hub)}/actions")
    await page.locator("#do-evaluate").get_by_role("button").click()
    await expect(page.locator("#log tbody tr").first.locator("td").first).to_have_text("evaluate")


async def test_without_scripts_the_hubs_token_is_asked_for(
    browser: Any,
    hub: ClientSession,
    guard: Guard,
    desk: Any,
) -> None:
    context = await browser.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(f"{address(hub)}/?token={guard.credentials.token}")
    await page.goto(f"{address(hub)}/actions")
    await page.locator("#do-evaluate [name=hub_token]").fill(guard.credentials.token)
    await page.locator("#do-evaluate").get_by_role("button").click()
    assert [record.action for record in await desk.log(limit=9, before=None)] == ["evaluate"]
