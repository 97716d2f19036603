"""Scoring processes with a task of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.sections import EvaluationConfig, HubConfig, TaskConfig
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems

NUMBERS = '''
"""Any plug-in: the reward is the completion read as a number; some numbers are bad luck."""
import os
import signal
import time

from echo_hub.tasks.base import Problem

KEPT = []


class Numbers:
    name = "numbers"

    def sample(self, seed):
        return Problem(prompt=f"{seed % 1000}=")

    def score(self, problem, completion):
        number = int(completion)
        if number == 10:
            KEPT.append(bytearray(2**27))
        if number == 11:
            os.fork() or signal.pause()
            os._exit(0)
        if number == 13:
            raise LookupError("13 brings bad luck")
        if number == 14:
            return float("nan")
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
        if number == 21:
            return os.getpid()
        return number / 100


def make(options):
    return Numbers()
'''

Opens = Callable[..., AbstractAsyncContextManager[ScoringPool]]


@pytest.fixture
def numbers_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opens:
    """Opens a pool whose task is `NUMBERS`; keyword arguments are settings of the task."""
    (tmp_path / "numbers_task.py").write_text(NUMBERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    base_dir = resolve_base("builtin:tiny")

    def open_pool(**settings: Any) -> AbstractAsyncContextManager[ScoringPool]:
        chosen = {"name": "python:numbers_task:make", "scorer_timeout_s": 1.0, **settings}
        config = HubConfig(task=TaskConfig(**chosen), evaluation=EvaluationConfig(problems=2))
        problems = Problems.of_run(config, PromptCodec.of_run(config, base_dir))
        return ScoringPool.open(config, problems, base_dir=base_dir, logs=tmp_path / "logs")

    return open_pool
