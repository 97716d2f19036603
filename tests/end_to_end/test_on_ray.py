"""A hub with its scorers, verifier and evaluations in a Ray cluster, and one node, train a run to its end."""

from __future__ import annotations

from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.lifecycle.export import evaluate_versions
from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import read_evaluations
from echo_hub.store.store import Store
from tests.ray_cluster import RayCluster
from tests.ray_cluster import until as until_so

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4


async def test_a_run_with_all_possible_processes_in_the_cluster(site: Any, until: Any, cluster: RayCluster) -> None:
    run = await site.make_run(
        "run",
        "--mode",
        "async",
        scoring={"engine": "ray"},
        trust={"verifier": "ray"},
        evaluation={"problems": 16, "by": "ray"},
        ray={"address": cluster.address},
        training={"steps": STEPS},
    )
    hub, url = await site.hub(run)
    await site.node(url, "volunteer", backend="torch")
    # On a busy machine the hub may report slow actors as a problem meanwhile, so only the state is checked.
    view = await until(url, lambda view: view["state"] == "finished")
    assert view["problems"] == []
    assert sum(view["trust"]["checks"].values()) > 0 == sum(view["trust"]["failed_checks"].values())
    status, _ = await hub.end()
    assert status == 0
    await until_so(lambda: not cluster.actors())
    store = Store.open(f"sqlite:///{run / 'echo.db'}")
    measured = list(store.read(read_evaluations))
    store.close()
    assert [one.policy_version for one in measured] == [0, STEPS]
    here = load_config(run / "config.toml", {"evaluation": {"by": "hub"}, "scoring": {"engine": "local"}})
    by_hub = await evaluate_versions(here, RunDirectory(run), policy_versions=[0, STEPS])
    assert [one.accuracy for one in measured] == [one.accuracy for one in by_hub.evaluations]
