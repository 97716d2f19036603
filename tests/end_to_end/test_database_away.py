"""A hub's database server dies during the run and starts again: the hub reports it, waits and continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from benchmarks.harness.postgresql import PostgreSQL, lacking, postgresql
from echo_hub.store.database import connect
from echo_hub.store.tables import steps

pytestmark = pytest.mark.timeout(600)

STEPS = 60
"""Number of training steps: more than the run makes before its database server is stopped."""


def batches(server: PostgreSQL) -> list[Any]:
    engine = connect(server.url)
    with engine.connect() as connection:
        query = select(steps.c.step, steps.c.rollout_ids).where(steps.c.trained_at.is_not(None)).order_by(steps.c.step)
        trained = list(connection.execute(query))
    engine.dispose()
    return trained


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_a_hub_waits_for_its_database_server_and_loses_nothing(site: Any, until: Any, operator: Any) -> None:
    with postgresql() as server:
        run = await site.make_run(training={"steps": STEPS}, store={"url": server.url})
        hub, url = await site.hub(run)
        node = await site.node(url, "volunteer")
        async with asyncio.timeout(240):
            while len(await asyncio.to_thread(batches, server)) < 2:
                pass  # Each query opens a connection, so the loop needs no sleep.
        server.stop()
        await hub.printed("the database server is unavailable; the hub waits")
        async with aiohttp.ClientSession(url, headers=operator(url)) as http:
            async with http.get("/healthz") as answer:
                health = await answer.json()
            assert health["state"] == "degraded" and any(
                "database server is unavailable" in why for why in health["reasons"]
            )
            for path in ("/log", "/api/v1/log", "/api/v1/steps", "/api/v1/actions"):
                async with http.get(path) as answer:
                    assert (answer.status, answer.headers.get("Retry-After")) == (503, "5"), path
        server.start()
        await hub.printed("the database server is back")
        view = await until(url, lambda view: view["state"] == "finished")
        books = view["accounting"]
        assert books["leased"] == books["trained"] + books["evaluated"] + sum(books["dropped"].values())
        trained = batches(server)
        assert [row.step for row in trained] == list(range(1, STEPS + 1))
        assert set(Counter(rollout for row in trained for rollout in row.rollout_ids).values()) == {1}
        assert (await node.end())[0] == 0
        status, said = await hub.end()
        assert (status, "Traceback" in said) == (0, False), said
