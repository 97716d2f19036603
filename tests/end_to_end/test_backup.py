"""A hub is backed up while it works, then killed; a hub elsewhere continues from the backup."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

MORE = 16
"""Number of steps that the run makes after it was restored from the backup."""


def adapters(run: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in run.glob("adapters/v*/adapter_model.safetensors")}


def leases(database: sqlite3.Connection) -> set[int]:
    return {lease_id for (lease_id,) in database.execute("SELECT DISTINCT lease_id FROM rollouts")}


@pytest.mark.slow
async def test_a_killed_hub_continues_at_another_place_from_a_live_backup(
    site: Any, until: Any, reached: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    # A checkpoint is written every fourth step, so the restored hub must train later steps again from rollouts in the
    # copied store.
    run = await site.make_run(
        "run", training={"steps": 100_000}, learner={"checkpoint_every": 4, "adapters_kept": 10_000}
    )
    hub, url = await site.hub(run)
    node = await site.node(url, "volunteer")
    await reached(run, 6)
    file = site.root / "run.backup"
    status, said = await site.command("echo_hub.main", "backup", run, file)
    assert status == 0 and "Keep it secret" in said, said
    await reached(run, 8)
    await hub.kill()
    await node.end()
    before = adapters(run)
    shutil.move(run, site.root / "lost")

    again = site.root / "elsewhere" / "run"
    status, said = await site.command("echo_hub.main", "restore", file, again)
    assert status == 0, said
    restored = adapters(again)
    newest = max(restored)
    assert restored.items() <= before.items(), "equal to the bit"
    checkpoints = sorted(int(path.name.removeprefix("step-")) for path in again.glob("checkpoints/step-*"))
    trained = int(newest[1:])
    assert checkpoints and checkpoints[-1] <= trained

    known = leases(books(again))
    steps = trained + MORE
    site.change(again, {"training": {"steps": steps}})
    hub, url = await site.hub(again)
    await site.node(url, "volunteer")
    await until(url, lambda view: view["state"] == "finished")
    assert (await hub.end())[0] == 0
    after = adapters(again)
    assert restored.items() <= after.items(), "repeated steps gave the same result"
    new = leases(books(again)) - known
    assert new and new.isdisjoint(leases(books(site.root / "lost"))), (
        "the new lease numbers differ from those already known to the node"
    )
    rows = books(again).execute("SELECT step, rollout_ids FROM steps WHERE trained_at IS NOT NULL").fetchall()
    assert sorted(step for step, _ in rows) == list(range(1, steps + 1))
    used = Counter(name for _, names in rows for name in json.loads(names))
    assert set(used.values()) == {1} and len(used) == steps * 8 * 4
    unfinished = books(again).execute("SELECT count(*) FROM rollouts WHERE state NOT IN ('trained', 'dropped')")
    assert unfinished.fetchone() == (0,)
