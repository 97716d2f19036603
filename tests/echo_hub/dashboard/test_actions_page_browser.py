"""Every operator action works by its form or button in a real browser; the hub's own code carries it out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import pytest

from echo_hub.actions.records import ActionOutcome
from echo_hub.actions.requests import TABLE
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.actions_page import OF_NODES

HOSTILE: Final = '"><script>alert(1)</script>'
TYPED: Final = {
    "max_staleness": {"value": "4"},
    "publish_every": {"value": "2"},
    "learning_rate": {"value": "0.0001"},
    "objective": {"value": "clip_high=0.3"},
    "spend_cap_per_hour": {"value": "2.5"},
    "invite": {"name": HOSTILE, "keys": "2"},
    "uninvite": {"name": HOSTILE},
    "token": {"name": HOSTILE},
    "revoke_token": {"name": HOSTILE},
    "tenant_quota": {"tenant": HOSTILE, "tokens_per_day": "500"},
    "block_tenant": {"tenant": HOSTILE},
    "unblock_tenant": {"tenant": HOSTILE},
}
"""Values to type into the forms that need one."""
OUTCOMES: Final = {
    "resume": "Leasing is open already.",
    "max_staleness": "1 → 4",
    "publish_every": "1 → 2",
    "learning_rate": "0.0001",
    "objective": "The objective of this run does not change.",
    "spend_cap_per_hour": "0 → 2.5",
    "publish": "is published in any case",
    "evaluate": "wanted",
    "export": "This run has no policy version yet.",
    **dict.fromkeys(("tenant_quota", "block_tenant", "unblock_tenant"), "There was never a token of this name"),
}
"""Expected text of the outcome, for each action whose text says more than "done"."""
REFUSED: Final = {"resume", "objective", "publish", "export", "tenant_quota", "block_tenant", "unblock_tenant"}
"""Actions that the hub refuses here: the run is not paused, the coordinator lacks an objective, no version is
published, and no token has the scope `use`."""
UNDONE: Final = {"pause", "drain", "max_staleness", "publish_every", "spend_cap_per_hour", "invite", "token"}
"""Actions for which the log must offer "undo". The learning rate is missing: it was 0 before, and no operator can set
0."""


@pytest.fixture
async def page(browser: Any, open_hub: Any, source: Any, guard: Guard, desk: Any) -> AsyncIterator[Any]:
    """Yield a page of a logged-in operator. The test fails if the page logs an error. `origin` is the hub's address."""
    hub = await open_hub(source, token="", desk=desk)
    async with hub.get("/healthz") as response:
        origin = str(response.url.origin())
    context = await browser.new_context(base_url=origin)
    opened = await context.new_page()
    wrong: list[str] = []
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    await opened.goto(f"/?token={guard.credentials.token}")
    yield opened
    assert [said for said in wrong if "status of 40" not in said] == [], "only refusals of actions"


async def test_every_action_is_confirmed_done_logged_and_undone_if_possible(page: Any, guard: Guard) -> None:
    from playwright.async_api import expect

    page.on("dialog", lambda dialog: pytest.fail(f"something that was typed ran: {dialog.message}"))
    await page.get_by_role("link", name="Actions").click()
    newest, undone = page.locator("#log tbody tr").first, set()

    async def ask(action: str) -> None:
        form = page.locator(f"#do-{action}")
        for field, typed in TYPED.get(action, {}).items():
            await form.locator(f"[name={field}]").fill(typed)
        await form.get_by_role("button").click()

    for action, kind in TABLE.items():
        if action in OF_NODES or action == "rotate_operator_token":
            continue
        await ask(action)
        if kind.ASKS:
            await expect(page.locator("#confirm")).to_contain_text(action)
            await page.get_by_role("link", name="No", exact=True).click()
            await expect(page.locator("#confirm")).to_have_count(0)
            await expect(newest.locator("td").first).not_to_have_text(action)
            await ask(action)
            await page.get_by_role("button", name="Yes, do it").click()
        await expect(newest.locator("td").first).to_contain_text(action)
        await expect(newest).to_contain_text(OUTCOMES.get(action, "done"))
        await expect(page.locator(".refusal")).to_have_count(int(action in REFUSED))
        if await newest.get_by_role("button", name="Undo").count() and action not in ("invite", "token"):
            await newest.get_by_role("button", name="Undo").click()
            await expect(newest).to_contain_text("undoes")
            undone.add(action)
        elif await page.locator("#secret code").count():
            assert len(await page.locator("#secret code").last.inner_text()) > 30
            undone.update(await page.get_by_role("button", name="Undo").count() * [action])
        await expect(page.locator("#log script")).to_have_count(0)
    assert undone == UNDONE

    token = guard.credentials.token
    await ask("rotate_operator_token")
    await page.get_by_role("button", name="Yes, do it").click()
    await page.goto("/actions")
    await expect(page.locator("#secret")).to_have_attribute("type", "password")
    assert guard.credentials.token != token, "all sessions end, this one too"


async def test_every_action_on_a_node_is_confirmed_and_logged(page: Any, source: Any, desk: Any) -> None:
    """The buttons on a node's page depend on the node's standing, so the test gives the node several standings to reach
    all actions."""
    from playwright.async_api import expect

    nodes, asked = source.nodes, list[str]()
    answers = {"first": False}

    async def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        await (dialog.accept() if answers["first"] else dialog.dismiss())

    page.on("dialog", answer)
    done: set[str] = set()
    for standing, banned_at in (("new", None), ("proven", None), ("quarantined", None), ("new", 1.0)):

        async def stands(standing: str = standing, banned_at: float | None = banned_at) -> Any:
            one, *others = await nodes()
            totals = replace(one.totals, standing=standing, banned_at=banned_at)
            return (replace(one, connected=banned_at is None, totals=totals), *others)

        source.nodes = stands
        node_id = (await stands())[0].totals.node_id
        await page.goto(f"/fleet/{node_id}")
        for button in await page.locator("#actions button").evaluate_all("(all) => all.map((one) => one.id)"):
            action = button.partition("-")[0]
            for confirmed in (False, True):
                before, answers["first"] = await desk.log(limit=1, before=None), confirmed
                await page.locator(f"#{button}").click()
                if confirmed:
                    await page.wait_for_load_state()
                (*newest,) = await desk.log(limit=1, before=None)
                assert (newest == list(before)) != confirmed, action
            assert (newest[0].action, newest[0].request["node"]) == (action, node_id)
            assert asked[-1] == asked[-2] and asked[-1].endswith(".")
            # The hub refuses "trust" here, because the node has not returned anything yet.
            if newest[0].outcome is ActionOutcome.REFUSED:
                await expect(page.locator(".refusal")).to_contain_text(newest[0].detail)
                await page.goto(f"/fleet/{node_id}")
            await expect(page).to_have_url(f"/fleet/{node_id}")
            done.add(action)
    assert done == OF_NODES
