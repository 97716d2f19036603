"""Real hub and node: both must record the same work of the node, which a certificate confirms."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


async def node(site: Any, home: Path, *arguments: str) -> Any:
    """Return the JSON output of `echo-node ... --json`."""
    status, said = await site.command("echo_node.main", *arguments, "--data-dir", home, "--json")
    assert status == 0, said
    return json.loads(said)


def trained_in(listed: Any) -> list[str]:
    return [row["rollout_id"] for row in listed["receipts"] if row["hub"]["state"] == "trained"]


@pytest.mark.slow
async def test_the_accounts_agree_and_the_hub_certifies_them(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await site.make_run(training={"steps": 100_000})
    hub, url = await site.hub(run)
    volunteer = await site.node(url, "volunteer")
    home = site.root / "volunteer"
    await until(url, lambda view: view["trained_step"] >= 1)
    beside = await node(site, home, "receipts", "list", "--limit", "1000")
    assert beside["problem"] == "" and trained_in(beside), "while the node is connected"
    await volunteer.end()
    before = await node(site, home, "receipts", "list", "--limit", "1000")
    assert "different" not in {row["agreement"] for row in before["receipts"]}
    one = await node(site, home, "receipts", "show", trained_in(before)[0])
    assert one["hub"]["state"] == "trained"
    out = site.root / "mine.json"
    said = (await node(site, home, "receipts", "certificate", "--out", str(out)))["certificate"]
    (after,) = books(run).execute("SELECT count(*) FROM rollouts WHERE state = 'trained'").fetchone()
    assert 0 < len(trained_in(before)) <= said["trained_rollouts"] <= after, "training may continue in the meantime"
    assert said["node_name"] == "volunteer"
    assert said["trained_tokens"] > 0 and out.with_suffix(".svg").exists()
    await hub.end()
    assert (await node(site, home, "receipts", "verify", str(out)))["certificate"] == said
    assert (await node(site, home, "receipts", "list", "--limit", "1"))["problem"]
    stranger = site.root / "stranger"
    status, printed = await site.command("echo_node.main", "receipts", "verify", out, "--data-dir", stranger)
    assert status == 1 and "unknown here" in printed
