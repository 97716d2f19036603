from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_hub.config.reward_section import RewardConfig
from echo_hub.config.scoring_sections import RayConfig, ScoringConfig
from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig, TaskConfig
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems

NUMBERS = '''
"""Any plug-in: the reward is the completion read as a number; some numbers are bad luck."""
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from echo_hub.tasks.base import Problem

KEPT = []
ODD_REWARDS = {1: float("inf"), 2: 1e30, 3: "0.5", 4: True, 5: None, 6: -0.01, 14: float("nan")}


def start_two():
    """Processes in sessions of their own; the parent of the second is gone already."""
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    one = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL, **quiet)
    script = "setsid sleep 1000 > /dev/null & echo $!"
    two = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True, **quiet)
    with Path(__file__).with_name("started").open("a") as started:
        print(one.pid, int(two.stdout), file=started)


class Numbers:
    name = "numbers"

    def sample(self, seed):
        return Problem(prompt=f"{seed % 1000}=")

    def score(self, problem, completion):
        number = int(completion)
        if number in ODD_REWARDS:
            return ODD_REWARDS[number]
        if number in (7, 8):
            start_two()
        if number == 8:
            os._exit(0) if completion == "08" else time.sleep(10**6)
        if number == 10:
            KEPT.append(bytearray(2**27))
        if number == 11:
            os.fork() or signal.pause()
            os._exit(0)
        if number == 13:
            raise LookupError("13 brings bad luck")
        if number == 15:
            os._exit(0)
        if number == 16:
            os.abort()
        if number == 17:
            9 ** 9 ** 9  # Holds the interpreter's lock for ever.
        if number == 18:
            time.sleep(10**6)
        if number == 19:
            bytearray(2**40)
        if number == 20:
            raise SystemExit(3)
        if number == 130:
            ctypes.string_at(0)
        if number == 131:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 132:
            try:
                bytearray(2**40)
            except MemoryError:
                raise ValueError("no room for so many candidates")
        if number == 133:
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
            os.abort()
        if number == 21:
            return os.getpid() / 2**22  # Linux has no higher number.
        if number == 12:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.closerange(3, 100)  # As daemons do, the pipe to the hub among them.
            time.sleep(10**6)
        return number / 100


def make(options):
    return Numbers()
'''


def pool_processes(hub: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the scoring processes that a hub's process has started; default: this process. If a scoring process has a
    warden (a parent that ends its children), return the warden instead."""
    children = (hub or psutil.Process()).children()
    return [child for child in children if any(part.startswith("echo_hub.scoring.") for part in child.cmdline())]


Opens = Callable[..., AbstractAsyncContextManager[ScoringPool]]


@pytest.fixture
def numbers_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opens:
    """Return a function that opens a pool of scoring processes with the task `NUMBERS`. Keyword arguments are settings
    of the task; `ray` holds the Ray settings, for a pool in a cluster.
    """
    (tmp_path / "numbers_task.py").write_text(NUMBERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    base_dir = resolve_base("builtin:tiny")

    @asynccontextmanager
    async def open_pool(
        *, reward: Any = None, ray: Any = None, owner: str = "", is_patient: bool = True, **settings: Any
    ) -> AsyncIterator[ScoringPool]:
        chosen = {"name": "python:numbers_task:make", "scorer_timeout_s": 1.0, **settings}
        config = HubConfig(
            task=TaskConfig(**chosen),
            evaluation=EvaluationConfig(problems=2),
            reward=RewardConfig.model_validate(reward or {}),
            scoring=ScoringConfig(engine="local" if ray is None else "ray"),
            ray=RayConfig.model_validate(ray or {}),
        )
        problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir))
        logs = tmp_path / "logs"
        async with (
            open_cluster(config, base_dir, logs=logs, owner=owner) as cluster,
            ScoringPool.open(
                config, problems, base_dir=base_dir, logs=logs, cluster=cluster, is_patient=is_patient
            ) as pool,
        ):
            yield pool

    return open_pool
