"""A volunteer leaves and comes back with the same key: the hub must report all work done with this key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_after_leave_and_join_the_node_reports_the_hubs_totals(site: Any, operator: Any, until: Any) -> None:
    run = await site.make_run(training={"steps": 100_000})
    _, url = await site.hub(run)

    async def books() -> dict[str, Any]:
        async with aiohttp.ClientSession(headers=operator(url)) as http, http.get(f"{url}/api/v1/nodes") as answer:
            (seen,) = (await answer.json())["nodes"]
        return dict(seen)

    async def status() -> dict[str, Any]:
        code, said = await site.command("echo_node.main", "status", "--json", "--data-dir", site.root / "volunteer")
        return dict(json.loads(said)) if code == 0 else {}

    node = await site.node(url, "volunteer")
    await until(url, lambda view: view["trained_step"] >= 2)
    code, said = await site.command("echo_node.main", "leave", "--force", "--data-dir", site.root / "volunteer")
    assert code == 0, said
    assert (await node.ended())[0] == 0
    before = await books()
    assert before["trained_rollouts"] > 0

    node = await site.node(url, "volunteer")
    await node.printed("Connected")
    async with asyncio.timeout(300):
        while not (answer := await status()).get("totals"):
            pass  # No pause is needed: each query starts a process.
        totals = answer["totals"]
        assert totals["trained"] >= before["trained_rollouts"]
        assert answer["rollouts"].get("trained", 0) <= totals["trained"] - before["trained_rollouts"], (
            "the node's own count"
        )
        assert (totals["rank"], totals["num_ranked"]) == (1, 1)
        assert answer["page"] == f"{url}/nodes/{answer['node_id'][:10]}"
        # While training continues, the node's totals must follow those on the hub's pages.
        goal = (await books())["trained_rollouts"] + 1
        while (await status())["totals"]["trained"] < goal:
            pass
    async with aiohttp.ClientSession() as http, http.get(answer["page"]) as page:
        text = await page.text()
    assert page.status == 200 and "volunteer is #1" in text
    code, said = await node.end()
    assert code == 0, said
    for words in ("Over all time: ", "Rank: 1 of 1.", f"Your page: {answer['page']}", "Continue with: echo-node run"):
        assert words in said
