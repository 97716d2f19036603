"""Scorers run in a Ray cluster of two real raylets. Even after kills of any process, their answers must equal those of
local scorers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_shared.errors import ScorerError
from tests.echo_hub.scoring.conftest import Opens
from tests.ray_cluster import WITHIN_S, RayCluster, kill, until

pytestmark = pytest.mark.slow

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))
MANY = [*range(22, 100)] * 30


async def rewards(pool: ScoringPool, *numbers: int) -> list[Any]:
    async with asyncio.timeout(WITHIN_S):
        return await pool.call("respond", [(3, [CODEC.encode_prompt(str(number))]) for number in numbers])


def started(command: list[str]) -> subprocess.Popen[str]:
    """Start a process, and return it when it has printed "ready". Ray may print other lines before."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if "ready\n" not in process.stdout:  # This reads lines up to "ready".
        process.communicate()
        raise AssertionError(f"it has ended: {process.returncode}")
    return process


def below(process: psutil.Process, module: str) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if module in child.cmdline()]


def right(numbers: list[int]) -> list[float]:
    return [number / 100 for number in numbers]


async def test_each_way_a_scorer_ends_is_reported_like_a_local_one(numbers_pool: Opens, cluster: RayCluster) -> None:
    numbers = [50, 13, 16, 51, 17, 19, 52]
    told = []
    for ray in ({"address": cluster.address}, None):
        async with numbers_pool(ray=ray, scorer_processes=1) as pool:
            answers = await rewards(pool, *numbers)
            told.append([each.brief if isinstance(each, ScorerError) else each for each in answers])
            if ray is not None:
                (actor,) = cluster.actors()
                assert len(below(actor, "echo_hub.scoring.warden")) == 1
    there, here = told
    assert there == here
    await until(lambda: not cluster.actors())


async def test_each_call_gets_its_own_result_despite_kills(numbers_pool: Opens, cluster: RayCluster) -> None:
    on_other = {"address": cluster.address, "scorer_resources": {"other": 1}}
    # A busy machine may delay a scorer by seconds while another raylet starts.
    async with numbers_pool(ray=on_other, scorer_processes=2, scorer_timeout_s=WITHIN_S) as pool:
        assert await rewards(pool, *MANY) == right(MANY)
        await until(lambda: len(cluster.actors()) == 2)

        under_way = asyncio.create_task(rewards(pool, *MANY))
        await asyncio.sleep(0)
        kill(cluster.actors()[0])
        assert await under_way == right(MANY)

        (driver,) = [child for child in psutil.Process().children() if "echo_hub.cluster.driver" in child.cmdline()]
        under_way = asyncio.create_task(rewards(pool, *MANY))
        await asyncio.sleep(0)
        kill(driver)
        await until(lambda: pool.absence)
        assert await under_way == right(MANY)
        assert pool.absence == ""

        under_way = asyncio.create_task(rewards(pool, *MANY))
        await asyncio.sleep(0)
        cluster.kill_other()
        assert await under_way == right(MANY)
    await until(lambda: not cluster.actors())


HUB = """
import asyncio, sys
from pathlib import Path
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems

async def main():
    ray = {"address": sys.argv[1]}
    config = HubConfig.model_validate({"scoring": {"engine": "ray"}, "ray": ray, "evaluation": {"problems": 2}})
    base_dir = resolve_base(config.model.base)
    problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir))
    logs = Path(sys.argv[2])
    async with (
        open_cluster(config, base_dir, logs=logs, owner="run") as cluster,
        ScoringPool.open(config, problems, base_dir=base_dir, logs=logs, cluster=cluster) as pool,
    ):
        await pool.call("respond", [(0, [problems.prompt_ids(0)])])
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_nothing_of_a_hub_that_was_killed_is_left(tmp_path: Path, cluster: RayCluster) -> None:
    command = [sys.executable, "-c", HUB, cluster.address, str(tmp_path)]
    with started(command) as hub:
        left = [*cluster.actors(), *psutil.Process(hub.pid).children(recursive=True)]
        left += [process for actor in cluster.actors() for process in actor.children(recursive=True)]
        assert len(left) >= 4
        hub.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, timeout=WITHIN_S)
    assert alive == []


OTHERS = """
import sys, ray
from echo_hub.cluster.actor import ChildHost
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
actor = ray.remote(ChildHost).options(name="run-scorer-0", num_cpus=0).remote()
ray.get(actor.close.remote())
print("ready", flush=True)
sys.stdin.read()
"""


async def test_only_the_actor_of_an_earlier_hub_is_ended(numbers_pool: Opens, cluster: RayCluster) -> None:
    """Let a driver outlive its hub, as after a kill. The run's next hub must end this driver's actors, but no actors of
    other runs."""
    drivers = []
    for namespace in ("echo", "elsewhere"):
        command = [sys.executable, "-c", OTHERS, cluster.address, namespace]
        drivers.append(started(command))
        if namespace == "echo":
            (earlier,) = cluster.actors()
    (stranger,) = set(cluster.actors()) - {earlier}
    try:
        async with numbers_pool(ray={"address": cluster.address}, scorer_processes=1, owner="run") as pool:
            assert await rewards(pool, 50) == [0.5]
            assert not earlier.is_running()
        assert stranger.is_running()
    finally:
        for driver in drivers:
            driver.communicate()
    await until(lambda: not cluster.actors())


async def test_a_full_cluster_is_reported_and_waited_for(numbers_pool: Opens, cluster: RayCluster) -> None:
    nowhere = {"address": cluster.address, "scorer_resources": {"nowhere": 1}}
    async with numbers_pool(ray=nowhere, scorer_processes=1) as pool:
        waiting = asyncio.create_task(rewards(pool, 50))
        await until(lambda: pool.absence)
        assert pool.absence.startswith("Ray lacks resources: each needs 1 CPU, 1 nowhere; the cluster has ")
        assert not waiting.done()
        waiting.cancel()


READS = """
from pathlib import Path
from echo_hub.tasks.base import Problem

class Reads:
    name = "reads"
    def sample(self, seed):
        return Problem(prompt=f"{seed % 1000}=")
    def score(self, problem, completion):
        return float(Path("data/score.txt").read_text())

def make(options):
    return Reads()
"""


async def test_a_task_reads_the_files_sent_with_it(
    numbers_pool: Opens, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    (work / "data" / "score.txt").write_text("0.25")
    (tmp_path / "reads_task.py").write_text(READS)
    monkeypatch.syspath_prepend(tmp_path)
    ray = {"address": cluster.address, "working_dir": str(work)}
    async with numbers_pool(ray=ray, scorer_processes=1, name="python:reads_task:make") as pool:
        assert await rewards(pool, 50) == [0.25]


async def test_a_file_of_problems_is_sent(numbers_pool: Opens, cluster: RayCluster, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "7"}}\n' for n in range(20)))
    ray = {"address": cluster.address}
    options = {"path": str(file), "answer": "exact"}
    async with numbers_pool(ray=ray, scorer_processes=1, name="jsonl", options=options) as pool:
        assert await rewards(pool, 7, 8) == [1.0, 0.0]


async def test_a_machine_that_cannot_make_the_task_is_reported(
    numbers_pool: Opens, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub cannot create the task on the other machine, because the task imports a module that only the hub's
    machine has."""
    package = tmp_path / "installed"
    package.mkdir()
    (package / "beside_the_hub.py").write_text("")
    (tmp_path / "lacks_task.py").write_text("import beside_the_hub\n" + READS)
    monkeypatch.syspath_prepend(package)
    monkeypatch.syspath_prepend(tmp_path)
    lacks = {"ray": {"address": cluster.address}, "scorer_processes": 1, "name": "python:lacks_task:make"}
    with pytest.raises(ScorerError, match="No module named 'beside_the_hub'"):
        async with numbers_pool(**lacks, is_patient=False) as pool:
            await rewards(pool, 50)
    async with numbers_pool(**lacks) as pool:
        await until(lambda: "No module named 'beside_the_hub'" in pool.absence)
