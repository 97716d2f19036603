from __future__ import annotations

import re
from typing import Any

from echo_shared.records.tenant import TenantFailure, TenantsOverview, TenantTotals
from tests.echo_hub.dashboard.conftest import HOSTILE_NAMES
from tests.echo_hub.dashboard.scripted_views import STARTED

OVERVIEW = TenantsOverview(
    as_of=STARTED,
    tenants=(
        TenantTotals(
            tenant_id="Ada",
            token_expires_at=STARTED + 9e5,
            sessions=2,
            models=3,
            queued=12,
            requests_today=345,
            prompt_tokens_today=6_000,
            drawn_tokens_today=700,
            trained_tokens_today=80,
            recent_tokens=99_000,
            tokens_per_day=50_000,
            has_own_quota=True,
            saved_bytes=2_500_000,
        ),
        TenantTotals(tenant_id="Bob", token_expires_at=STARTED + 9e5, blocked_at=STARTED - 60),
        TenantTotals(tenant_id="Gone", token_expires_at=None),
        *(TenantTotals(tenant_id=name, token_expires_at=STARTED) for name in HOSTILE_NAMES),
    ),
    failures=(
        TenantFailure(
            at=STARTED - 5,
            tenant_id=HOSTILE_NAMES[0],
            request_id="r-1",
            kind="sample",
            error=f"no {HOSTILE_NAMES[1]}",
            category="user",
        ),
    ),
)


class ScriptedTenants:
    def __init__(self, overview: TenantsOverview = OVERVIEW) -> None:
        self._overview = overview

    async def overview(self) -> TenantsOverview:
        return self._overview


async def test_the_page_shows_who_uses_what(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source, tenants=ScriptedTenants())
    async with hub.get("/tenants") as answer:
        page = await answer.text()
    assert answer.status == 200
    (ada,) = re.findall(r"<tr><th scope=\"row\"><bdi>Ada.*?</tr>", page, re.DOTALL)
    for shown in ("345", "6,780", "6,000 read", "700 drawn", "80 trained", "50,000", "its own", "99,000", "2.5"):
        assert shown in ada, shown
    assert 'action="/actions/block_tenant"' in ada and 'action="/actions/tenant_quota"' in ada
    (bob,) = re.findall(r"<tr><th scope=\"row\"><bdi>Bob.*?</tr>", page, re.DOTALL)
    assert "blocked" in bob and 'action="/actions/unblock_tenant"' in bob and "no limit" in bob
    assert "has no valid token" in page
    async with hub.get("/leaderboard") as answer:
        assert 'href="/tenants"' in await answer.text()


async def test_hostile_names_and_errors_are_only_text(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source, tenants=ScriptedTenants())
    async with hub.get("/tenants") as answer:
        page = await answer.text()
    shown = re.sub(r'value="[^"]*"', "", page)
    assert "<script>alert" not in page and "<img" not in page and "{{ 7 * 7 }}" in page and "\u202e" not in shown


async def test_scripts_get_the_same_as_json(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source, tenants=ScriptedTenants())
    async with hub.get("/api/v1/tenants") as answer:
        told = await answer.json()
    assert told["tenants"][0]["tenant_id"] == "Ada" and told["tenants"][0]["tokens_today"] == 6_780
    assert told["failures"][0]["error"] == OVERVIEW.failures[0].error


async def test_without_tenants_there_is_no_page_and_no_link(open_hub: Any, source: Any) -> None:
    hub = await open_hub(source)
    async with hub.get("/tenants") as answer:
        assert answer.status == 404
    async with hub.get("/leaderboard") as answer:
        assert "/tenants" not in await answer.text()


async def test_only_the_operator_sees_tenants(open_hub: Any, source: Any) -> None:
    stranger = await open_hub(source, token="", tenants=ScriptedTenants())
    for path in ("/tenants", "/api/v1/tenants"):
        async with stranger.get(path) as answer:
            assert answer.status == 401


async def test_an_empty_page_says_how_to_begin(open_hub: Any, source: Any) -> None:
    empty = ScriptedTenants(TenantsOverview(as_of=STARTED, tenants=()))
    hub = await open_hub(source, tenants=empty)
    async with hub.get("/tenants") as answer:
        page = await answer.text()
    assert "echo-hub act RUN token NAME scope=use" in page and "No request has failed" in page


async def test_the_page_fits_a_phone(browser: Any, open_hub: Any, source: Any, guard: Any) -> None:
    """Hidden labels in a wide table must scroll with the table. Otherwise they would widen the page."""
    hub = await open_hub(source, token="", tenants=ScriptedTenants())
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    context = await browser.new_context(base_url=origin, viewport={"width": 390, "height": 800})
    page = await context.new_page()
    await page.goto(f"/?token={guard.credentials.token}")
    await page.goto("/tenants")
    assert await page.locator("#tenants input[type=number]").count() == len(OVERVIEW.tenants)
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
