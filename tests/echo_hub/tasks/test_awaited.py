from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.awaited import awaited, is_async
from echo_hub.tasks.base import ExplainedTask, Problem
from echo_hub.tasks.environments.base import Ending, ReplayedEnvironment, Response
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError

PROBLEM = Problem(prompt="1+1=")


class Meeting:
    """A task whose calls wait for each other: none returns until `size` calls have begun."""

    name = "meeting"
    reward_bounds = (0.0, 2.0)

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)

    def sample(self, seed: int) -> Problem:
        return PROBLEM

    async def score(self, problem: Problem, completion: str) -> float:
        if completion == "alone":
            raise TimeoutError("the service did not answer")
        await self._barrier.wait()
        return float(completion)

    async def components(self, problem: Problem, completion: str) -> dict[str, float]:
        return {"threads": float(threading.current_thread() is threading.main_thread())}


class Talk:
    name = "talk"

    def sample(self, seed: int) -> Problem:
        return PROBLEM

    async def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        return Ending(reward=1.0)


def test_many_threads_wait_for_calls_of_one_loop() -> None:
    task = awaited(Meeting(8), 30.0)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: task.score(PROBLEM, text), "01010101")) == [0.0, 1.0] * 4


def test_other_attributes_of_the_task_are_unchanged() -> None:
    task = awaited(Meeting(1), 30.0)
    assert isinstance(task, ExplainedTask) and not isinstance(task, ReplayedEnvironment)
    assert RewardBounds.of(task).highest == 2.0 and task.sample(1) == PROBLEM
    assert task.components(PROBLEM, "1") == {"threads": 0.0}
    talk = awaited(Talk(), 30.0)
    assert isinstance(talk, ReplayedEnvironment) and talk.respond(PROBLEM, ["x"]) == Ending(reward=1.0)
    assert is_async(Meeting(1)) and is_async(Talk()) and not is_async(make_arithmetic({}))


def test_a_timeout_or_an_error_affects_one_call() -> None:
    task = awaited(Meeting(2), 0.05)
    with pytest.raises(ScorerError, match="took too long"):
        task.score(PROBLEM, "1")
    with pytest.raises(TimeoutError, match="did not answer"):
        task.score(PROBLEM, "alone")
    with ThreadPoolExecutor(2) as threads:
        patient = awaited(Meeting(2), 30.0)
        assert list(threads.map(lambda text: patient.score(PROBLEM, text), "01")) == [0.0, 1.0]
