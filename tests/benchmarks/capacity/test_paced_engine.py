"""An engine slowed to a given speed samples the same tokens as the engine that it wraps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

from benchmarks.capacity.paced_engine import TOKEN_S, PacedEngine
from echo_node.backends.base import Engine, EngineEvent
from echo_shared.sampling.interface import GroupRequest


class _ThreeSteps:
    """An engine whose steps take no time."""

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        yield from ([], [], [])


def test_a_step_takes_the_given_time() -> None:
    paced = PacedEngine(cast(Engine, _ThreeSteps()), 0.02)
    began = time.perf_counter()
    assert list(paced.sample(iter(()))) == [[], [], []]
    assert time.perf_counter() - began >= 3 * 0.02


def test_the_process_ends_when_its_pipe_closes() -> None:
    command = [sys.executable, "-m", "benchmarks.capacity.paced_engine"]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, env={**os.environ, TOKEN_S: "0.1"}, timeout=60)
