"""A verifier and an evaluator in a Ray cluster of two real raylets must give the results of local processes, even if a
driver or an actor is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from echo_hub.cluster.link import RayLink
from echo_hub.cluster.model_processes import process_of
from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.evaluator import Evaluator, evaluator_of
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.verify.drawn import DrawnRollout, NodeEvidence
from echo_hub.verify.verifier import Verifier, program
from tests.echo_hub.verify.conftest import VERSIONS, Versions, _one_thread, base_dir, versions
from tests.echo_hub.verify.test_verifier import Committed, Told, working
from tests.ray_cluster import RayCluster, kill, until

__all__ = ["_one_thread", "base_dir", "versions"]

pytestmark = pytest.mark.slow


@asynccontextmanager
async def linked(cluster: RayCluster, base: Path, logs: Path):  # type: ignore[no-untyped-def]
    config = HubConfig.model_validate(
        {
            "scoring": {"engine": "ray"},
            "trust": {"verifier": "ray"},
            "evaluation": {"by": "ray"},
            "ray": {"address": cluster.address, "verifier_resources": {"other": 1}},
        }
    )
    async with open_cluster(config, base, logs=logs, owner="run") as link:
        yield link


def verifier(versions: Versions, rollouts: Sequence[DrawnRollout], logs: Path, link: RayLink | None) -> Verifier:
    process = process_of(program(versions.settings), versions.settings, logs=logs, cluster=link, kept=1)
    return Verifier(
        process, versions.settings, directory=versions.directory, kept=1, patience=3, rollouts=Committed(rollouts)
    )


async def checked(checker: Verifier, told: Told, rollouts: Sequence[DrawnRollout], then: Callable[[], object]) -> None:
    for one in rollouts:
        checker.submit(one.rollout_id, is_urgent=True)
    await asyncio.sleep(0)
    then()
    await told.all_of([one.rollout_id for one in rollouts])


def driver() -> psutil.Process:
    (found,) = [child for child in psutil.Process().children() if "echo_hub.cluster.driver" in child.cmdline()]
    return found


def plain(spans: tuple[NodeEvidence, ...] | str) -> object:
    """Return the evidence without the parts that depend on which rollouts were batched together."""
    if isinstance(spans, str):
        return spans
    return [(node_id, shown.draws, shown.claims, shown.num_tokens) for node_id, shown in spans]


async def test_a_verifier_in_a_cluster_equals_a_local_one(
    versions: Versions, cluster: RayCluster, tmp_path: Path
) -> None:
    drawn = {version: versions.drawn(version, *range(8 * version, 8 * version + 8)) for version in range(VERSIONS + 1)}
    drawn[2] = [replace(one, completion_ids=np.flip(one.completion_ids)) for one in drawn[2]]
    everything = [one for of_version in drawn.values() for one in of_version]
    beside = verifier(versions, everything, tmp_path, None)
    async with working(beside) as here:
        await checked(beside, here, everything, lambda: None)
    async with linked(cluster, versions.settings.base_dir, tmp_path) as link:
        elsewhere = verifier(versions, everything, tmp_path, link)
        async with working(elsewhere) as there:
            await checked(elsewhere, there, drawn[0], lambda: None)
            await checked(elsewhere, there, drawn[1], lambda: kill(cluster.actors()[0]))
            await checked(elsewhere, there, drawn[2], lambda: kill(driver()))
            await checked(elsewhere, there, drawn[3], cluster.kill_other)
            assert elsewhere.absence == ""
    assert {name: plain(spans) for name, spans in there.of.items()} == {
        name: plain(spans) for name, spans in here.of.items()
    }
    await until(lambda: not cluster.actors())


async def test_evaluations_in_a_cluster_equal_local_ones_and_share_a_driver(
    versions: Versions, cluster: RayCluster, tmp_path: Path
) -> None:
    async def drawn(evaluator: Evaluator, version: int, *, greedy: bool = False) -> dict[tuple[int, int], object]:
        adapter = versions.directory.adapter(version) if version else None
        requests = [replace(versions.request(number), policy_version=version) for number in range(16)]
        found = await evaluator.generate(requests, adapter=adapter, greedy=greedy)
        assert found.seconds > 0
        return {(one.lease_id, one.index): one.completion_ids.tolist() for one in found.rollouts}

    beside = evaluator_of(versions.settings, logs=tmp_path, cluster=None)
    here = [await drawn(beside, version) for version in (0, 1, 2)] + [await drawn(beside, 2, greedy=True)]
    await beside.stop()
    async with linked(cluster, versions.settings.base_dir, tmp_path) as link:
        elsewhere = evaluator_of(versions.settings, logs=tmp_path, cluster=link)
        there = [await drawn(elsewhere, 0)]
        (actor,) = cluster.actors()
        under_way = asyncio.create_task(drawn(elsewhere, 1))
        await asyncio.sleep(0)
        kill(actor)
        there += [await under_way, await drawn(elsewhere, 2), await drawn(elsewhere, 2, greedy=True)]
        assert driver().is_running()
        assert {link.absence(kind) for kind in ("scorer", "verifier", "evaluator")} == {""}
    assert there == here
    assert len({str(sorted(of_version.items())) for of_version in here}) == 4
    await until(lambda: not cluster.actors())
