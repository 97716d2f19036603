"""The work of a node has the same count everywhere: on the node, in its hub, on the public pages, in its certificate,
and in another run of the same operator, which adds up the work for both runs.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.timeout(600)


async def node(site: Any, *arguments: str) -> Any:
    where = ("--data-dir", site.root / "volunteer", "--json")
    status, said = await site.command("echo_node.main", *arguments, *where)
    assert status == 0, said
    return json.loads(said)


def trained_in(listed: Any) -> list[str]:
    return [row["rollout_id"] for row in listed["receipts"] if row["hub"]["state"] == "trained"]


@pytest.mark.slow
async def test_all_sides_count_a_nodes_work_alike(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    about = {"description": "Sums <b>for</b> all.", "contact": "ada@example.org"}
    run = await site.make_run("first", training={"steps": 100_000}, about=about, run={"name": "first"})
    hub, url = await site.hub(run)

    def trained_here() -> int:
        (count,) = books(run).execute("SELECT count(*) FROM rollouts WHERE state = 'trained'").fetchone()
        return int(count)

    volunteer = await site.node(url, "volunteer")
    await until(url, lambda view: view["trained_step"] >= 1)
    made = await node(site, "team", "create", "The Herons")
    assert (made["team"], made["is_founder"], made["members"]) == ("The Herons", True, 1)
    step = (await until(url, lambda view: True))["trained_step"]
    await until(url, lambda view: view["trained_step"] > step + 1)
    team = await node(site, "team", "show")
    assert team["rollouts"] > 0 and team["rank"] == 1

    listed = await node(site, "receipts", "list", "--limit", "1000")
    assert listed["problem"] == "" and trained_in(listed), "while the node is connected"
    me = (await node(site, "id", "show"))["node_id"]
    second = await site.make_run("second", "--beside", str(run), run={"name": "second"})
    other_hub, other_url = await site.hub(second)
    view = await until(other_url, lambda view: view["siblings"])
    assert [(one["name"], one["address"]) for one in view["siblings"]] == [("first", url)]
    async with aiohttp.ClientSession() as stranger:

        async def read(address: str) -> Any:
            async with stranger.get(address) as answer:
                assert answer.status == 200, address
                return await (answer.json() if "/api/" in address else answer.text())

        assert "volunteer" in await read(team["page"])
        assert "volunteer is #1" in await read(f"{url}/nodes/{me[:10]}")
        assert "Sums &lt;b&gt;for&lt;/b&gt; all." in await read(f"{url}/about")
        receipt = await read(f"{url}/api/v1/receipts/{trained_in(listed)[0]}")
        mine = await node(site, "receipts", "show", trained_in(listed)[0])
        assert (receipt["state"], receipt["checked"]) == (mine["hub"]["state"], mine["hub"]["checked"])
        async with stranger.get(f"{url}/nodes/{me[:10]}/picture.png") as answer:
            assert answer.status == 200 and (await answer.read()).startswith(b"\x89PNG")
        (row,) = (await read(f"{other_url}/api/v1/leaderboard"))["leaderboard"]
        assert (row["name"], row["rollouts"]) == ("volunteer", 0) and row["elsewhere_rollouts"] > 0
        assert f'<a href="{url}/leaderboard"><bdi>first</bdi></a>' in await read(f"{other_url}/leaderboard")
    assert (await other_hub.end())[0] == 0

    await volunteer.end()
    before = await node(site, "receipts", "list", "--limit", "1000")
    assert "different" not in {row["agreement"] for row in before["receipts"]}
    out = site.root / "mine.json"
    certificate = (await node(site, "receipts", "certificate", "--out", str(out)))["certificate"]
    assert 0 < len(trained_in(before)) <= certificate["trained_rollouts"] <= trained_here()
    assert certificate["node_name"] == "volunteer"
    assert certificate["trained_tokens"] > 0 and out.with_suffix(".svg").exists()

    # `leave` deletes the node's records but not its key, so the hub must report all earlier work again.
    await node(site, "leave", "--force")
    volunteer = await site.node(url, "volunteer")
    await volunteer.printed("Connected")
    async with asyncio.timeout(300):
        while not (status := await node(site, "status")).get("totals"):
            pass  # Each query starts a process, so the loop needs no sleep.
        totals = status["totals"]
        assert totals["trained"] >= certificate["trained_rollouts"]
        own = status["rollouts"].get("trained", 0)
        assert own <= trained_here() - certificate["trained_rollouts"], "the node's own count, newer than the totals"
        assert (totals["rank"], totals["num_ranked"]) == (1, 1)
        assert status["page"] == f"{url}/nodes/{me[:10]}"
        goal = trained_here() + 1
        while (await node(site, "status"))["totals"]["trained"] < goal:
            pass
    code, said = await volunteer.end()
    assert code == 0, said
    for words in (
        "Over all time, by the hub's last count: ",
        "Rank: 1 of 1.",
        f"Your page: {status['page']}",
        "Continue with: echo-node run",
    ):
        assert words in said

    assert (await hub.end())[0] == 0
    assert (await node(site, "receipts", "verify", str(out)))["certificate"] == certificate
    assert (await node(site, "receipts", "list", "--limit", "1"))["problem"]
    elsewhere = ("--data-dir", site.root / "stranger")
    code, said = await site.command("echo_node.main", "receipts", "verify", out, *elsewhere)
    assert code == 1 and "unknown here" in said
