"""Real hubs and a real node: its team, its public page, a receipt that anybody can look up, and credit that moves to
another run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo_shared.signing.identity import fingerprint


async def node(site: Any, home: Path, *arguments: str) -> Any:
    """Return the JSON output of `echo-node ... --json`."""
    status, said = await site.command("echo_node.main", *arguments, "--data-dir", home, "--json")
    assert status == 0, said
    return json.loads(said)


@pytest.mark.slow
async def test_a_node_has_a_team_a_page_and_credit_in_two_runs(site: Any, until: Any) -> None:
    about = {"description": "Sums <b>for</b> all.", "contact": "ada@example.org"}
    run = await site.make_run(training={"steps": 100_000}, about=about)
    hub, url = await site.hub(run)
    volunteer = await site.node(url, "volunteer")
    home = site.root / "volunteer"
    await until(url, lambda view: view["trained_step"] >= 1)
    made = await node(site, home, "team", "create", "The Herons")
    assert (made["team"], made["is_founder"], made["members"]) == ("The Herons", True, 1)
    step = (await until(url, lambda view: True))["trained_step"]
    await until(url, lambda view: view["trained_step"] > step + 1)
    shown = await node(site, home, "team", "show")
    assert shown["rollouts"] > 0 and shown["rank"] == 1

    listed = (await node(site, home, "receipts", "list", "--state", "trained"))["receipts"]
    me = (await node(site, home, "id", "show"))["node_id"]
    async with aiohttp.ClientSession() as stranger:

        async def read(path: str) -> Any:
            async with stranger.get(path if path.startswith("http") else f"{url}{path}") as answer:
                assert answer.status == 200, path
                return await (answer.json() if "/api/" in path else answer.text())

        assert "volunteer" in await read(shown["page"])
        assert "volunteer is #1" in await read(f"/nodes/{me[:10]}")
        assert "Sums &lt;b&gt;for&lt;/b&gt; all." in await read("/about")
        receipt = await read(f"/api/v1/receipts/{listed[0]['rollout_id']}")
        mine = await node(site, home, "receipts", "show", listed[0]["rollout_id"])
        assert (receipt["state"], receipt["checked"]) == (mine["hub"]["state"], mine["hub"]["checked"])
        async with stranger.get(f"{url}/nodes/{me[:10]}/picture.png") as answer:
            assert answer.status == 200 and (await answer.read()).startswith(b"\x89PNG")
    await volunteer.end()
    await hub.end()

    status, said = await site.command("echo_hub.main", "credit", "export", run)
    assert status == 0, said
    document = said[said.index("{") : said.rindex("}") + 1]
    earned = json.loads(document)["credit"]
    assert [one["node_name"] for one in earned["nodes"]] == ["volunteer"]
    export = site.root / "earned.json"
    export.write_text(document)
    other = await site.make_run(name="other", training={"steps": 100_000})
    _, url = await site.hub(other)
    key = fingerprint(bytes.fromhex(earned["hub_key"]))
    status, said = await site.command("echo_hub.main", "credit", "import", other, export)
    assert status == 1 and key in said
    for expected in ("Added 1 node", "Already imported"):
        status, said = await site.command("echo_hub.main", "credit", "import", other, export, "--hub-key", key)
        assert status == 0 and expected in said
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{url}/api/v1/leaderboard") as answer:
        (row,) = (await answer.json())["leaderboard"]
    assert (row["name"], row["rollouts"]) == ("volunteer", 0)
    assert row["elsewhere_rollouts"] == earned["nodes"][0]["rollouts"] > 0


@pytest.mark.slow
async def test_two_runs_of_one_hub_link_and_count_each_others_credit(site: Any, until: Any) -> None:
    first = await site.make_run("first", training={"steps": 100_000}, run={"name": "first"})
    _, url = await site.hub(first)
    await site.node(url, "volunteer")
    await until(url, lambda view: view["trained_step"] >= 1)
    second = await site.make_run("second", "--beside", str(first), run={"name": "second"})
    _, other_url = await site.hub(second)
    view = await until(other_url, lambda view: view["siblings"])
    assert [(one["name"], one["address"]) for one in view["siblings"]] == [("first", url)]
    async with aiohttp.ClientSession() as stranger:
        async with stranger.get(f"{other_url}/api/v1/leaderboard") as answer:
            (row,) = (await answer.json())["leaderboard"]
        assert (row["name"], row["rollouts"]) == ("volunteer", 0) and row["elsewhere_rollouts"] > 0
        async with stranger.get(f"{other_url}/leaderboard") as answer:
            assert f'<a href="{url}/leaderboard"><bdi>first</bdi></a>' in await answer.text()
