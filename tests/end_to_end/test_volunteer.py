"""A volunteer's node loses nothing on a full disk, and `echo-node run` uses the hub and the options of the last
`echo-node join`.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
async def test_a_full_disk_stops_the_node_and_loses_nothing(
    site: Any, until: Any, reached: Any, small_disk: Any
) -> None:
    run = await site.make_run(training={"steps": 60})
    _, url = await site.hub(run)
    node = await site.node(url, "disk/node", env={**os.environ, "ECHO_NODE_MANNERS__MIN_FREE_DISK_BYTES": "0"})
    await reached(run, 1)
    small_disk.fill()
    before = await until(url, lambda view: view["trained_step"] >= 1)
    assert before["state"] == "running"
    await node.printed("disk is full|No space left|cannot be written")
    small_disk.empty()
    view = await until(url, lambda view: view["state"] == "finished")
    books = view["accounting"]
    assert books["leased"] == books["trained"] + sum(books["dropped"].values())
    status, said = await node.end()
    assert status == 0, said
    assert "Traceback" not in said


async def test_run_continues_as_join_began(site: Any, operator: Any) -> None:
    run = await site.make_run()
    _, url = await site.hub(run)
    node = await site.node(url, "volunteer", "--width", "8")
    await node.printed("Connected")
    assert (await node.end())[0] == 0
    node = await site.start("echo_node.main", "run", "--data-dir", site.root / "volunteer")
    await node.printed("Engine: llama_cpp on cpu \\(requested\\)")
    await node.printed("Connected")
    async with aiohttp.ClientSession(headers=operator(url)) as http, http.get(f"{url}/api/v1/nodes") as answer:
        (seen,) = (await answer.json())["nodes"]
    assert seen["name"] == "volunteer"
    status, said = await site.command("echo_node.main", "status", "--data-dir", site.root / "volunteer")
    assert status == 0, said
    assert url in said
    status, said = await site.command("echo_node.main", "leave", "--data-dir", site.root / "volunteer", "--force")
    assert status == 0, said
    assert (await node.ended())[0] == 0
    left = {path.name for path in (site.root / "volunteer" / "hubs").glob("*")}
    assert left == set()
    shutil.rmtree(site.root / "volunteer")
