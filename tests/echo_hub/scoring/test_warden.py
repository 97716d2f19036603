"""When a scoring process ends, all processes that its scorers started must end too. This holds for processes in
separate sessions, and even if the parent of the scoring process was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScorerDeath, ScoringPool
from echo_shared.errors import ScorerError
from tests.echo_hub.scoring.conftest import Opens, pool_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no subreaper")

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))
Started = Callable[[], list[psutil.Process]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Yield a function that lists the processes that scorers have started; after the test, these are killed."""

    since = time.time() - 1.0

    def read() -> list[psutil.Process]:
        written = tmp_path / "started"
        processes = []
        for pid in written.read_text().split() if written.exists() else []:
            try:
                process = psutil.Process(int(pid))
                if process.create_time() >= since:  # Otherwise the pid belongs to a newer process.
                    processes.append(process)
            except psutil.NoSuchProcess:
                pass  # The process has ended.
        return processes

    yield read
    for process in read():
        process.kill()


async def score(pool: ScoringPool, *texts: str) -> list[Any]:
    async with asyncio.timeout(60):
        return await pool.call("respond", [(3, [CODEC.encode_prompt(text)]) for text in texts])


async def test_nothing_is_left_when_the_pool_is_closed(numbers_pool: Opens, started: Started) -> None:
    async with numbers_pool() as pool:
        assert await score(pool, "7", "7") == [0.07, 0.07]
        assert len(started()) == 4, "they live as long as the scoring process"
    assert started() == []


async def test_a_killed_calls_processes_are_all_ended(numbers_pool: Opens, started: Started, tmp_path: Path) -> None:
    async with numbers_pool(scorer_processes=1) as pool:
        for text, why in (("8", "scorer_timeout_s = 1"), ("08", "exit status 0")):
            (died,) = await score(pool, text)
            assert isinstance(died, ScorerDeath) and why in str(died)
            assert (tmp_path / "started").read_text()
            assert await score(pool, "50") == [0.5]
            assert started() == []


async def test_a_scorer_or_warden_killed_from_outside_takes_its_children(numbers_pool: Opens, started: Started) -> None:
    """If the warden (the parent that ends a scorer's processes) is killed, the kernel's parent death signal ends the
    scoring process.
    """
    async with numbers_pool(scorer_processes=1) as pool:
        for whose in ("scorer", "warden"):
            assert await score(pool, "7" if whose == "scorer" else "50")
            (warden,) = pool_processes()
            (worker,) = (process for process in warden.children() if "echo_hub.scoring.worker" in process.cmdline())
            (worker if whose == "scorer" else warden).kill()
            _, left = await asyncio.to_thread(psutil.wait_procs, [warden, worker], 20)
            assert left == [] and started() == []
            assert await score(pool, "50") == [0.5]


HUB = """
import asyncio, pathlib, sys
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.config.sections import HubConfig
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems

async def main():
    base = resolve_base("builtin:tiny")
    codec = PromptCodec.load(base)
    config = HubConfig.model_validate({"task": {"name": "python:numbers_task:make", "scorer_timeout_s": 600.0}})
    problems = Problems.of_run(config, codec)
    async with ScoringPool.open(config, problems, base_dir=base, logs=pathlib.Path(sys.argv[1])) as pool:
        await pool.call("respond", [(0, [codec.encode_prompt("7")])])
        print("scored", flush=True)
        await pool.call("respond", [(0, [codec.encode_prompt(sys.argv[2])])])

asyncio.run(main())
"""


async def test_a_killed_hub_leaves_no_scoring_process(numbers_pool: Opens, started: Started, tmp_path: Path) -> None:
    """Scorers that are busy when the hub is killed must end long before their own time limit."""
    hub = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HUB, str(tmp_path), "17", stdout=asyncio.subprocess.PIPE
    )
    assert hub.stdout is not None
    async with asyncio.timeout(60):
        assert await hub.stdout.readline() == b"scored\n"
    wardens = pool_processes(psutil.Process(hub.pid))
    below = [process for warden in wardens for process in warden.children(recursive=True)]
    assert len(wardens) == 2 and len(started()) == 2 and len(below) == 4
    hub.send_signal(signal.SIGKILL)
    await hub.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, [*wardens, *below], 60)
    assert left == []


async def test_a_process_that_cannot_make_the_task_reports_the_reason_through_its_warden(
    numbers_pool: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = numbers_pool()
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    async with pool as opened:
        with pytest.raises(ScorerError, match="cannot make the run's task"):
            await score(opened, "50")


def test_a_warden_whose_hub_is_gone_already_ends_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "echo_hub.scoring.warden", "0"], stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    assert ended.returncode == 0
