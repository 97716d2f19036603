"""People whom the operator has invited by name join a real hub with real nodes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_an_invite_for_one_node_admits_one_until_revoked(site: Any) -> None:
    run = await site.make_run(server={"join": "invite"})
    hub, url = await site.hub(run)

    async def commanded(command: str, *arguments: str) -> str:
        status, said = await site.command("echo_hub.main", command, run, *arguments)
        assert status == 0, said
        return str(said)

    async def refused(name: str, *flags: str) -> str:
        status, said = await (await site.node(url, name, *flags)).ended()
        assert status == 1 and "Traceback" not in said
        return str(said)

    token = re.findall(r"--token (\S+)", await commanded("invite", "Ada", "--keys", "1"))[0]
    first = await site.node(url, "first", "--token", token)
    await first.printed("Connected")
    said = await refused("second", "--token", token)
    assert "This hub's invite for Ada is used up: 1 key has joined with it" in said
    assert "Ask the hub's operator for another invite" in said
    assert ((await first.end())[0], (await hub.end())[0]) == (0, 0)
    await site.hub(run, "--port", url.rpartition(":")[2])
    assert "used up" in await refused("second", "--token", token), "as before the hub's restart"
    again = await site.node(url, "first")
    await again.printed("Connected")
    (listed,) = json.loads(await commanded("invites", "--json"))["invites"]
    assert (listed["name"], listed["max_keys"], len(listed["node_ids"])) == ("Ada", 1, 1)
    assert f"Banned: {listed['node_ids'][0]}" in await commanded("uninvite", "Ada", "--ban")
    status, said = await again.ended()
    assert status == 1 and "banned" in said
    assert "has been revoked" in await refused("second", "--token", token)
