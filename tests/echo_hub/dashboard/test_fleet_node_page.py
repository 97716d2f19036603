"""One node's page shows everything that the hub knows of this node: in a scripted run, in a real store, and in
Chromium.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.core.accounting.effects import CheckRecorded, StandingRecorded, TrustDecided
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.dashboard.access.guard import Guard
from echo_hub.store.node_records import read_node_record
from echo_hub.store.store import Store
from echo_shared.records.run import RunEvent, Severity
from echo_shared.wire.messages import Checked
from tests.echo_hub.dashboard.public_parts import fill, open_store, served


async def page(hub: ClientSession, path: str, status: int = 200) -> str:
    async with hub.get(path) as response:
        assert response.status == status
        return await response.text()


async def test_all_that_is_known_of_a_node_is_on_its_page(open_hub: Any, make_source: Any) -> None:
    source = make_source(names=("a", "b", "<b>c"), step=37)
    hub = await open_hub(source)
    node = (await source.nodes())[2].totals
    text = await page(hub, f"/fleet/{node.node_id}")
    for said in (
        "<title>&lt;b&gt;c · echo · Echo</title>",
        f"<code>{node.node_id}</code>",
        f"<code>{'ab' * 32}</code>",
        "Apple M3 Pro",
        "linked with 2, 1 of them through both routers",
        '<span class="standing quarantined">quarantined</span>',
        "Its tokens are not drawn as leased &lt;b&gt;.",
        f'href="/nodes/{node.node_id[:10]}"',
        f'id="ban-{node.node_id}"',
        f'id="pardon-{node.node_id}"',
        f"/rollouts?node={node.node_id}&amp;drop=expired",
        f"/rollouts?node={node.node_id}&amp;check=failed",
        'href="/rollouts/300#r-900-0"',
        "Rollout 900-0 led to this decision.",
        "≤ 0.05",
        "41",
        f"/log?subject={node.node_id}",
        f'href="/api/v1/nodes/{node.node_id}"',
        "data-revision",
    ):
        assert said in text, said
    assert "<b>c" not in text and f'id="unban-{node.node_id}"' not in text


async def test_a_quarantined_node_that_stands_by_for_that_is_told_the_reason_once(
    open_hub: Any, make_source: Any
) -> None:
    source = make_source(names=("a", "b", "c"), step=37)
    node = (await source.nodes())[2]
    reason = node.totals.standing_reason

    async def nodes() -> Any:
        return (replace(node, standby=f"quarantined. {reason}"),)

    source.nodes = nodes
    text = await page(await open_hub(source), f"/fleet/{node.totals.node_id}")
    head = text[text.index('id="now"') : text.index('id="actions"')]
    assert head.count(escape(reason)) == 1


async def test_a_nodes_history_is_its_log_entries(open_hub: Any, source: Any) -> None:
    node_id = (await source.nodes())[0].totals.node_id
    asked = []

    async def events(wanted: Any, limit: int) -> tuple[RunEvent, ...]:
        asked.append((wanted.subject, limit))
        return (RunEvent(number=4, at=1.0, kind="node_banned", severity=Severity.WARNING, text="it <i>was</i> banned"),)

    source.events = events
    text = await page(await open_hub(source), f"/fleet/{node_id}")
    assert "<bdi>it &lt;i&gt;was&lt;/i&gt; banned</bdi>" in text and 'class="warning"' in text
    assert asked == [(node_id, 20)]


async def test_a_banned_node_can_be_unbanned(open_hub: Any, source: Any) -> None:
    nodes = source.nodes

    async def banned() -> Any:
        first, second = await nodes()
        return replace(first, connected=False, totals=replace(first.totals, banned_at=1.0)), second

    source.nodes = banned
    node_id = (await nodes())[0].totals.node_id
    text = await page(await open_hub(source), f"/fleet/{node_id}")
    assert f'id="unban-{node_id}"' in text and f'id="ban-{node_id}"' not in text
    assert '<span class="activity banned">banned</span>' in text


@pytest.mark.parametrize("unknown", ["nobody", "%3Cscript%3E", "x" * 100, "a%00b"])
async def test_an_unknown_node_has_no_page(hub: ClientSession, unknown: str) -> None:
    text = await page(hub, f"/fleet/{unknown}", 404)
    assert "There is no node of this id" in text and "<script>" not in text
    async with hub.get(f"/api/v1/nodes/{unknown}") as response:
        assert response.status == 404 and (await response.json())["error"]


async def test_as_json(hub: ClientSession, source: Any) -> None:
    node = (await source.nodes())[1]
    async with hub.get(f"/api/v1/nodes/{node.totals.node_id}") as response:
        told = await response.json()
    assert set(told) == {"node", "public_key", "outcomes", "shown", "decisions", "checked", "rollouts"}
    assert (told["node"]["name"], told["node"]["precision"]) == ("attic-pc", "bf16")
    assert told["outcomes"][1] == {"outcome": "expired", "rollouts": 10, "received": 0, "tokens": 0}
    assert told["shown"]["draws"][-1] == {"edge": None, "tokens": 7}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


async def test_the_books_of_a_real_store_are_on_the_page(source: Any, store: Store, guard: Guard) -> None:
    """Each known node must have a page, even one that the list of nodes lacks."""
    (node_id,) = fill(store, ("ada",), now=1_780_000_000.0)
    row = StandingRow(node_id=node_id, state=StandingState.QUARANTINED, reason="Not drawn as leased.", num_checked=1)
    decided = TrustDecided(
        node_id=node_id,
        decision=Decision.QUARANTINED,
        reason="Not drawn as leased.",
        rollout_id="1-0",
        evidence=Evidence.of([0.0] * 17, [-1.0] * 17, [0.99] * 17, [-1.0] * 17),
        decided_at=5.0,
    )
    checked = CheckRecorded(rollout_id="1-0", checked=Checked.FAILED)
    store.apply([StandingRecorded(row=row), decided, checked], now=6.0)

    async def node(wanted: str) -> Any:
        return store.read(read_node_record, wanted)

    source.node = node
    async with served(source, store, guard) as stranger:
        operator = {"Authorization": f"Bearer {guard.credentials.token}"}
        async with stranger.get(f"/fleet/{node_id}", headers=operator) as response:
            assert response.status == 200
            text = await response.text()
        assert '<a href="/rollouts/0#r-1-0">1-0</a></th><td class="verdict-failed">failed</td>' in text
        assert '<td class="number">17</td>' in text and "1970-01-01T00:00:05Z" in text
        assert ">trained</a></th>" in text and '<span class="activity away">away</span>' in text
        for headers, shown in ((operator, True), ({}, False)):
            async with stranger.get(f"/nodes/{node_id[:10]}", headers=headers) as response:
                assert (f'href="/fleet/{node_id}"' in await response.text()) == shown


async def test_an_operator_finds_a_node_among_many_and_bans_it_in_a_real_browser(
    browser: Any,
    open_hub: Any,
    make_source: Any,
    guard: Guard,
    desk: Any,
    hostile_names: tuple[str, ...],
) -> None:
    """Test a phone screen and a desktop screen, with node names that contain HTML."""
    from playwright.async_api import expect

    source = make_source(names=(*hostile_names, *(f"machine-{i:03}" for i in range(120))), step=37)
    hub = await open_hub(source, token="", desk=desk, min_interval_s=0.1)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    nodes = [node.totals for node in await source.nodes()]
    for scheme, wide, banned, searched in (("dark", 390, 0, "<SCRIPT>alert"), ("light", 1_280, 1, "IMG SRC=x")):
        hostile, name = nodes[banned].node_id, nodes[banned].name
        page = await browser.new_page(color_scheme=scheme, viewport={"width": wide, "height": 800})
        wrong: list[str] = []
        page.on(
            "console",
            lambda said, wrong=wrong: wrong.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        asked: list[str] = []

        async def answer(dialog: Any, asked: list[str] = asked) -> None:
            asked.append(dialog.message)
            await (dialog.dismiss() if len(asked) == 1 else dialog.accept())

        page.on("dialog", answer)
        await page.goto(f"{origin}/?token={guard.credentials.token}")
        await page.get_by_role("link", name="Fleet").click()
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("#node-rows tr")).to_have_count(100)
        await page.get_by_role("link", name="Node", exact=True).click()
        await expect(page).to_have_url(re.compile("sort=name"))
        await expect(page.locator("th[aria-sort=ascending]")).to_have_text(re.compile("Node"))
        await page.get_by_role("link", name="Next").click()
        await expect(page.locator("#paging")).to_contain_text("101 to 128 of 128")
        await expect(page.locator("#node-rows tr")).to_have_count(28)
        await page.locator("#by-q").fill(searched)
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("#node-rows tr")).to_have_count(1)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.locator(f"#of-{hostile}").click()
        await expect(page).to_have_url(f"{origin}/fleet/{hostile}")
        await expect(page.locator("h1")).to_have_text(name)
        await expect(page.locator("#link")).to_have_text("live")
        source.advance()
        await expect(page.locator("#figures")).to_contain_text(f"newest published {source.step}")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.locator("img").count() == 0
        before = len(await desk.log(limit=9, before=None))
        await page.get_by_role("button", name="Ban").click()
        assert len(await desk.log(limit=9, before=None)) == before, "it was not confirmed"
        await page.get_by_role("button", name="Ban").click()
        await page.wait_for_load_state()
        await expect(page).to_have_url(f"{origin}/fleet/{hostile}")
        records = await desk.log(limit=9, before=None)
        assert [(one.action, one.request["node"]) for one in records[: len(records) - before]] == [("ban", hostile)]
        assert asked == [asked[0]] * 2 and asked[0].startswith(f"Ban {name}? The node is disconnected")
        await page.goto(f"{origin}/fleet/{hostile[:10]}")
        await expect(page.locator("h1")).to_have_text("There is no node of this id")
        await page.get_by_role("link", name="search for ids that begin with it").click()
        await expect(page.locator("#node-rows tr")).to_have_count(1)
        assert [said for said in wrong if "404" not in said] == []
        await page.close()
