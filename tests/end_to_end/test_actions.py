"""Operators' actions, by command and by API, on a hub in a separate process; also across kill -9."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from aiohttp import ClientSession

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_a_killed_hub_stays_paused_and_does_the_actions_noted_in_the_meantime(site: Any, until: Any) -> None:
    run = await site.make_run(training={"steps": 3, "max_staleness": 2})
    hub, url = await site.hub(run)

    async def commanded(command: str, *arguments: str) -> str:
        status, said = await site.command("echo_hub.main", command, run, *arguments)
        assert status == 0, said
        return str(said)

    assert "open -> paused" in await commanded("act", "pause", "--wait", "60")
    assert "2 -> 4" in await commanded("act", "max_staleness", "4", "--wait", "60")
    token = re.findall(r"echo_[\w-]{43}", await commanded("act", "token", "ci", "scope=operate"))[0]
    assert "clip_high=0.0 -> clip_high=0.3" in await commanded("act", "objective", "clip_high=0.3", "--wait", "60")
    await hub.kill()
    assert "Stored as action 5" in await commanded("act", "publish_every", "3", "--wait", "0")
    hub, url = await site.hub(run)
    await until(url, lambda view: view["live"]["publish_every"] == 3)
    async with ClientSession(url, headers={"Authorization": f"Bearer {token}"}) as script:
        async with script.get("/api/v1/run") as answer:
            told = await answer.json()
        assert (told["leasing"], told["max_staleness"]) == ("paused", 4)
        async with script.post("/api/v1/actions/5/undo") as answer:
            undone = await answer.json()
            assert answer.status == 200 and (undone["record"]["before"], undone["record"]["after"]) == (3, 1), undone
        async with script.post("/api/v1/actions/4/undo") as answer:
            undone = (await answer.json())["record"]
            assert (undone["before"], undone["after"]) == ("clip_high=0.3", "clip_high=0.0"), (
                "the action survived the hub"
            )
        async with script.post("/api/v1/actions/token", json={"name": "more", "scope": "admin"}) as answer:
            assert answer.status == 403
        node = await site.node(url, "lender")
        await node.printed("Connected")
        async with script.get("/api/v1/run") as answer:
            assert (await answer.json())["accounting"]["leased"] == 0, "it is still paused"
        async with script.post("/api/v1/actions/learning_rate", json={"value": 1e-3}) as answer:
            assert answer.status == 200
        async with script.post("/api/v1/actions/resume", json={}) as answer:
            assert answer.status == 200
        await until(url, lambda view: view["state"] == "finished")
    listed = json.loads(await commanded("audit", "--json"))["actions"]
    done = [(one["action"], one["via"], one["outcome"]) for one in reversed(listed)]
    assert done == [
        ("pause", "cli", "done"),
        ("max_staleness", "cli", "done"),
        ("token", "cli", "done"),
        ("objective", "cli", "done"),
        ("publish_every", "cli", "done"),
        ("publish_every", "api", "done"),
        ("objective", "api", "done"),
        ("learning_rate", "api", "done"),
        ("resume", "api", "done"),
    ]
