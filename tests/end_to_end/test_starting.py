"""Runs that start from an adapter, and forks of runs: nodes sample with that adapter, and their rollouts pass the hub's
checks.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_shared.delta.adapter import load_adapter

pytestmark = pytest.mark.timeout(600)

CHECKED = {"trust": {"verifier": "process", "first_checked": 4096}}


async def trained(site: Any, until: Any, name: str, **settings: Any) -> Path:
    run: Path = await site.make_run(name, **settings)
    await serve(site, until, run)
    return run


async def serve(site: Any, until: Any, run: Path) -> dict[str, Any]:
    hub, url = await site.hub(run)
    node = await site.node(url, "node-1", backend="torch")
    view: dict[str, Any] = await until(url, lambda view: view["state"] == "finished")
    assert (await hub.end())[0] == 0
    await node.ended()
    return view


@pytest.mark.slow
async def test_a_run_begins_with_a_version_of_another(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    first = await trained(site, until, "first", training={"steps": 2, "learning_rate": 0.01})
    run = await site.make_run(
        "second",
        model={"start_from": f"{first}@2"},
        training={"steps": 3, "learning_rate": 1e-4},
        objective={"kl_coefficient": 0.1, "reference": "start"},
        **CHECKED,
    )
    view = await serve(site, until, run)
    assert (view["first_version"], view["trained_step"]) == (1, 3)
    assert view["lineage"][0].startswith("version 2 of echo (")
    database = books(run)
    steps = database.execute("SELECT step, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step").fetchall()
    assert [step for step, _ in steps] == [2, 3]
    assert json.loads(steps[0][1])["base_kl"] < 1e-4, "the first step trains from exactly the reference"
    oldest, failed = database.execute(
        "SELECT min(policy_version), sum(checked = 'failed') FROM rollouts WHERE group_id >= 0"
    ).fetchone()
    assert (oldest, failed) == (1, 0), "no rollout was sampled with the base, and all samples are honest"
    assert {one["policy_version"] for one in view["evaluations"]} == {0, 1, 3}
    given, taken = load_adapter(first / "adapters" / "v000002"), load_adapter(run / "adapters" / "v000001")
    assert all((a.b == b.b).all() and (a.a == b.a).all() for a, b in zip(given.modules, taken.modules, strict=True))
    assert (await site.command("echo_hub.main", "export", run, site.root / "out", "--version", "1"))[0] == 0
    assert "version 2 of echo" in (site.root / "out" / "README.md").read_text()


@pytest.mark.slow
async def test_a_run_continues_from_a_fine_tuned_base(site: Any, until: Any) -> None:
    run = await site.make_run(
        "run",
        sampling={"max_tokens": 6},
        training={"steps": 3, "learning_rate": 1e-4, "lora_rank": 16},
        evaluation={"problems": 128},
        **CHECKED,
    )
    rng = np.random.default_rng(1)
    sums = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in rng.integers(100, 1000, (2000, 2)).tolist()]
    file = site.root / "sums.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in sums))
    options = ("--epochs", "1", "--batch-tokens", "1024", "--learning-rate", "0.003")
    assert (await site.command("echo_hub.main", "sft", run, file, *options))[0] == 0
    view = await serve(site, until, run)
    assert view["lineage"] == ["the base, fine-tuned on sums.jsonl"]
    accuracies = {one["policy_version"]: one["accuracy"] for one in view["evaluations"] if one["kind"] == "greedy"}
    assert accuracies[0] < 0.6 and min(accuracies[1], accuracies[3]) > 0.75, "the base forgets to carry"
