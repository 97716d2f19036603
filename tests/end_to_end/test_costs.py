"""A donated and a paid node: the hub chooses which of them works, reports why, and counts the cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.timeout(600)

Get = Callable[[str, str], Awaitable[Any]]
PRICE = 3.6
"""Price of the paid node in US dollars per hour: a tenth of a cent per second."""


@pytest.fixture
def get(operator: Any) -> Get:
    """Return `await get(url, "run")`, which asks the hub's API as operator."""

    async def ask(url: str, what: str) -> Any:
        async with (
            aiohttp.ClientSession(headers=operator(url)) as session,
            session.get(f"{url}/api/v1/{what}") as response,
        ):
            return await response.json()

    return ask


async def node_of(get: Get, url: str, name: str) -> Any:
    found = [node for node in (await get(url, "nodes"))["nodes"] if node["name"] == name]
    return found[0] if found else None


async def until(condition: Callable[[], Awaitable[Any]], within_s: float = 200.0) -> Any:
    async with asyncio.timeout(within_s):
        while True:
            if found := await condition():
                return found
            await asyncio.sleep(0.1)


async def status_of(site: Any, name: str) -> Any:
    code, said = await site.command("echo_node.main", "status", "--json", "--data-dir", site.root / name)
    assert code == 0, said
    return json.loads(said)


@pytest.mark.slow
async def test_the_donated_node_works_and_the_paid_one_replaces_it_when_lost(
    site: Any, get: Get, tmp_path: Path
) -> None:
    run = await site.make_run(
        # Many small updates make a step long, so that the donated node alone suffices even on a busy machine. Rollouts
        # sampled before the first step are trained before the paid node gets work.
        training={"steps": 100_000, "updates_per_step": 8, "max_staleness": 8},
        learner={"micro_batch_tokens": 64},
        cost={"spend_cap_per_hour": 5.0, "dwell_s": 0.0, "margin": 1.0},
    )
    hub, url = await site.hub(run)
    gift = await site.node(url, "gift", backend="torch")

    async def trains() -> bool:
        return bool((await get(url, "run"))["trained_step"] >= 3)

    await until(trains)
    dear = await site.node(url, "dear", "--cost-per-hour", str(PRICE), "--power-watts", "200", backend="torch")
    await dear.printed("Standing by: cheaper nodes do all the work")

    async def is_warm() -> Any:
        node = await node_of(get, url, "dear")
        return node if node["policy_version"] and node["standby"] else None

    waiting = await until(is_warm)
    assert waiting["standby"].startswith("cheaper nodes suffice")
    assert (waiting["cost_per_hour"], waiting["costs_per_hour"], waiting["power_watts"]) == (PRICE, PRICE, 200.0)
    assert "cheaper nodes" in (await status_of(site, "dear"))["standby"]
    cost = (await get(url, "run"))["cost"]
    assert (cost["nodes_standing_by"], cost["nodes_active"], cost["spend_per_hour"]) == (1, 0, 0.0)
    before = waiting["received"]

    await gift.kill()

    async def works() -> Any:
        node = await node_of(get, url, "dear")
        return node["received"] > before + 8

    await until(works)
    await dear.printed("The hub has work for this node again")
    run_view = await get(url, "run")
    assert run_view["cost"]["spend_per_hour"] == PRICE and run_view["cost"]["nodes_active"] == 1
    assert (await status_of(site, "dear"))["standby"] == ""

    async def is_booked() -> Any:
        return (await get(url, "run"))["cost"]["total"] >= PRICE / 3600 * 5

    await until(is_booked)
    await hub.kill()
    again, url = await site.hub(run)
    cost = (await get(url, "run"))["cost"]
    assert cost["total"] >= PRICE / 3600 * 5, "booked cost survives the hub"
    assert cost["total"] == pytest.approx(PRICE / 3600 * cost["active_s"])
    await again.kill()
