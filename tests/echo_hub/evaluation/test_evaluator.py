"""Evaluations by real local processes; tests/echo_hub/cluster/test_model_processes_ray.py has those in
a Ray cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from echo_hub.evaluation import evaluator as evaluators
from echo_hub.evaluation.evaluator import Evaluator, evaluator_of
from echo_hub.evaluation.work_count import WorkCount
from echo_shared.errors import LearnerError
from echo_shared.sampling.interface import GroupRequest
from tests.echo_hub.verify.conftest import Versions, _one_thread, base_dir, versions
from tests.ray_cluster import kill

__all__ = ["_one_thread", "base_dir", "versions"]


@pytest.fixture
def count() -> WorkCount:
    return WorkCount(doing="Evaluating", units="completions")


@pytest.fixture
async def evaluator(versions: Versions, count: WorkCount, tmp_path: Path) -> AsyncIterator[Evaluator]:
    made = evaluator_of(versions.settings, logs=tmp_path, cluster=None, count=count)
    yield made
    processes = below()
    await made.stop()
    assert not any(process.is_running() for process in processes)


def below() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "echo_hub.evaluation.worker" in child.cmdline()]


def asked(versions: Versions, version: int) -> list[GroupRequest]:
    return [replace(versions.request(number), policy_version=version) for number in range(8)]


async def test_each_rollout_is_drawn_once_by_its_version_whatever_is_killed(
    versions: Versions, evaluator: Evaluator, count: WorkCount
) -> None:
    assert (await evaluator.generate([], adapter=None, greedy=False)).rollouts == [] and not below(), "nothing to draw"
    for version in (0, 2):
        requests = asked(versions, version)
        adapter = versions.directory.adapter(version) if version else None
        under_way = asyncio.create_task(evaluator.generate(requests, adapter=adapter, greedy=False))
        if version:
            await asyncio.sleep(0)
            kill(below()[0])
        found = (await under_way).rollouts
        drawn = {(one.lease_id, one.index): one.completion_ids.tolist() for one in found}
        right = {(one.lease_id, one.index): one.completion_ids.tolist() for one in versions.draw(version, requests)}
        assert (drawn, len(found)) == (right, len(right))
        count.total += len(right)
        assert count.done == count.total
    second_turns = [replace(request, indices=request.indices[:1]) for request in requests[:3]]
    await evaluator.generate(second_turns, adapter=adapter, greedy=False)
    assert count.done == count.total == 2 * len(right) + 3, "the total grows by each later turn"


async def test_a_failure_of_all_evaluator_processes_is_reported(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluators, "DEATHS_IN_A_ROW", 1)
    nothing = versions.settings.model_copy(update={"base_dir": tmp_path / "nothing"})
    broken = evaluator_of(nothing, logs=tmp_path, cluster=None)
    with pytest.raises(LearnerError, match="cannot work"):
        await broken.generate(asked(versions, 0), adapter=None, greedy=False)
    lacks = evaluator_of(versions.settings, logs=tmp_path, cluster=None)
    with pytest.raises(LearnerError, match=r"(?s)evaluator process keeps dying.*v000009: .*No such file"):
        await lacks.generate(asked(versions, 9), adapter=versions.directory.adapter(9), greedy=False)
    await lacks.stop()
    assert below() == []
