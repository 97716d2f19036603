"""A hub's disk becomes full during the run: the hub reports it, waits, and resumes once there is space."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

STEPS = 60


@pytest.mark.slow
async def test_a_hub_waits_for_room_and_loses_nothing(site: Any, until: Any, reached: Any, small_disk: Any) -> None:
    run = await site.make_run(
        "disk/run", training={"steps": STEPS}, learner={"checkpoint_every": 5, "adapters_kept": 8}
    )
    hub, url = await site.hub(run)
    node = await site.node(url, "volunteer")
    await reached(run, 3)
    small_disk.fill()
    await hub.printed("the disk is full, and the hub waits")
    view = await until(url, lambda view: any("The disk is full" in problem for problem in view["problems"]))
    assert view["health"]["state"] != "ready"
    small_disk.empty()
    await hub.printed("there is room on the disk again")
    view = await until(url, lambda view: view["state"] == "finished")
    assert not any("The disk is full" in problem for problem in view["problems"])
    books = view["accounting"]
    assert books["leased"] == books["trained"] + books["evaluated"] + sum(books["dropped"].values())
    with closing(sqlite3.connect(run / "echo.db")) as database:
        query = "SELECT step, rollout_ids FROM steps WHERE trained_at IS NOT NULL ORDER BY step"
        steps = [(step, json.loads(ids)) for step, ids in database.execute(query)]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert set(Counter(rollout for _, ids in steps for rollout in ids).values()) == {1}
    assert (await node.end())[0] == 0
    status, said = await hub.end()
    assert (status, "Traceback" in said) == (0, False), said
