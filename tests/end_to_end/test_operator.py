"""An operator's actions, by command and by API, and invites survive kill -9. If metrics cannot be written, the run
continues.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_what_an_operator_asked_for_holds_after_kill_9(
    site: Any, until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights & Biases, to which the run sends its metrics, fails during this test. The hub must report this, and the
    run must continue.
    """
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)
    run = await site.make_run(
        training={"steps": 3, "max_staleness": 2},
        server={"join": "invite"},
        metrics={"wandb": "online", "texts": 2},
    )
    hub, url = await site.hub(run)

    async def commanded(command: str, *arguments: str) -> str:
        status, said = await site.command("echo_hub.main", command, run, *arguments)
        assert status == 0, said
        return str(said)

    async def refused(name: str, *flags: str) -> str:
        status, said = await (await site.node(url, name, *flags)).ended()
        assert status == 1 and "Traceback" not in said
        return str(said)

    assert "open -> paused" in await commanded("act", "pause", "--wait", "60")
    assert "2 -> 4" in await commanded("act", "max_staleness", "4", "--wait", "60")
    token = re.findall(r"echo_[\w-]{43}", await commanded("act", "token", "ci", "scope=operate"))[0]
    assert "clip_high=0.0 -> clip_high=0.3" in await commanded("act", "objective", "clip_high=0.3", "--wait", "60")
    invite = re.findall(r"--token (\S+)", await commanded("invite", "Ada", "--keys", "1"))[0]
    first = await site.node(url, "first", "--token", invite)
    await first.printed("Connected")
    said = await refused("second", "--token", invite)
    assert "This hub's invite for Ada is used up: 1 key has joined with it" in said
    assert "Ask the hub's operator for another invite" in said
    assert (await first.end())[0] == 0
    await hub.kill()
    assert "Stored as action 6" in await commanded("act", "publish_every", "3", "--wait", "0")

    hub, url = await site.hub(run, "--port", url.rpartition(":")[2])
    await until(url, lambda view: view["live"]["publish_every"] == 3)
    assert "used up" in await refused("second", "--token", invite)
    async with ClientSession(url, headers={"Authorization": f"Bearer {token}"}) as script:
        async with script.get("/api/v1/run") as answer:
            told = await answer.json()
        assert (told["leasing"], told["max_staleness"]) == ("paused", 4)
        async with script.post("/api/v1/actions/6/undo") as answer:
            undone = await answer.json()
            assert answer.status == 200 and (undone["record"]["before"], undone["record"]["after"]) == (3, 1), undone
        async with script.post("/api/v1/actions/4/undo") as answer:
            undone = (await answer.json())["record"]
            assert (undone["before"], undone["after"]) == ("clip_high=0.3", "clip_high=0.0"), (
                "the action survived the hub"
            )
        async with script.post("/api/v1/actions/token", json={"name": "more", "scope": "admin"}) as answer:
            assert answer.status == 403
        first = await site.node(url, "first")
        await first.printed("Connected")
        async with script.get("/api/v1/run") as answer:
            assert (await answer.json())["accounting"]["leased"] == 0, "it is still paused"
        async with script.post("/api/v1/actions/learning_rate", json={"value": 1e-3}) as answer:
            assert answer.status == 200
        async with script.post("/api/v1/actions/resume", json={}) as answer:
            assert answer.status == 200
        view = await until(url, lambda view: view["state"] == "finished")
        async with script.get("/readyz") as answer:
            assert answer.status == 200, "the run does not need the sink"
    (problem,) = (problem for problem in view["problems"] if problem.startswith("Weights & Biases"))
    assert "gets no figures; the run continues without it" in problem
    assert any(problem in event["text"] for event in view["events"])
    assert list((run / "tensorboard").glob("events.out.tfevents.*")), "the working sink has all figures"

    (listed,) = json.loads(await commanded("invites", "--json"))["invites"]
    assert (listed["name"], listed["max_keys"], len(listed["node_ids"])) == ("Ada", 1, 1)
    assert f"Banned: {listed['node_ids'][0]}" in await commanded("uninvite", "Ada", "--ban")
    status, said = await first.ended()
    assert status == 1 and "banned" in said
    assert "has been revoked" in await refused("second", "--token", invite)
    done = json.loads(await commanded("audit", "--json"))["actions"]
    assert [(one["action"], one["via"], one["outcome"]) for one in reversed(done)] == [
        ("pause", "cli", "done"),
        ("max_staleness", "cli", "done"),
        ("token", "cli", "done"),
        ("objective", "cli", "done"),
        ("invite", "cli", "done"),
        ("publish_every", "cli", "done"),
        ("publish_every", "api", "done"),
        ("objective", "api", "done"),
        ("learning_rate", "api", "done"),
        ("resume", "api", "done"),
        ("uninvite", "cli", "done"),
    ]
