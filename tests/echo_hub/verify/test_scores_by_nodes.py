from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_hub.verify.scores_by_nodes import NodeScores
from echo_shared.wire.messages import CheckLease, CheckResult, VersionSpan

Figures = NDArray[np.float64]
PROMPT = np.array([5, 9, 2, 8], np.int32)


class World:
    """A hub whose nodes a and b form a pair. `answers`: the answer of each node; None = it does not answer."""

    def __init__(self, answers: dict[str, list[float] | None], *, agrees: bool = True, is_pair: bool = True) -> None:
        self._answers = answers
        self._agrees = agrees
        self._is_pair = is_pair
        self.asked: list[tuple[str, CheckLease]] = []
        self.compared: list[list[float]] = []
        self.scores = NodeScores(pairs=self, connections=self, temperature=0.5, deadline_s=0.3)

    def pair(self, lot: str, policy_version: int) -> tuple[str, str] | None:
        return ("a", "b") if self._is_pair else None

    def agree(self, nodes: tuple[str, str], one_N: Figures, other_N: Figures, *, warmth: float) -> bool:
        assert nodes == ("a", "b") and warmth == 2.0
        self.compared = [one_N.tolist(), other_N.tolist()]
        return self._agrees

    def send(self, node_id: str, message: Any) -> None:
        assert isinstance(message, CheckLease)
        self.asked.append((node_id, message))
        given = self._answers[node_id]
        if given is not None:
            logprobs = np.array(given, np.float32)
            answer = CheckResult(rollout_id=message.rollout_id, below=np.zeros_like(logprobs), logprobs=logprobs)
            assert not self.scores.answered("c", answer), "another node was not asked"
            asyncio.get_running_loop().call_soon(self.scores.answered, node_id, answer)


GOOD: dict[str, list[float] | None] = {"a": [-1.0, -2.0, -0.5], "b": [-1.0, -2.1, -0.5]}


async def test_two_nodes_compute_the_same_prompt_and_their_mean_counts() -> None:
    world = World(GOOD)
    found = await world.scores.logprobs(PROMPT, 7)
    assert found is not None and found.dtype == np.float32
    assert found.tolist() == pytest.approx([-1.0, -2.05, -0.5])
    (a, first), (b, second) = world.asked
    assert (a, b) == ("a", "b") and first == second
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist(), first.temperature) == ([5], [9, 2, 8], 1.0)
    assert first.versions == (VersionSpan(policy_version=7, num_tokens=3),)
    assert first.rollout_id.startswith("0-"), "no lease has this number"
    assert world.compared == [pytest.approx(logprobs) for logprobs in GOOD.values()]
    assert (world.scores.num_agreed, world.scores.num_unlike) == (1, 0)
    await world.scores.logprobs(PROMPT, 7)
    assert len({lease.rollout_id for _, lease in world.asked}) == 2


@pytest.mark.parametrize(
    "world",
    [
        World(GOOD, agrees=False),
        World(GOOD, is_pair=False),
        World({**GOOD, "b": []}),
        World({**GOOD, "b": [-1.0, -2.0]}),
        World({**GOOD, "b": None}),
    ],
    ids=["they disagree", "no pair", "one declines", "one answers for fewer tokens", "one is silent"],
)
async def test_otherwise_the_hub_must_compute_them(world: World) -> None:
    assert await world.scores.logprobs(PROMPT, 7) is None
    assert world.scores.num_agreed == 0


async def test_a_prompt_of_one_token_has_nothing_to_compute() -> None:
    world = World(GOOD)
    assert await world.scores.logprobs(PROMPT[:1], 7) is None and world.asked == []


async def test_a_late_answer_is_not_taken() -> None:
    world = World({**GOOD, "b": None})
    await world.scores.logprobs(PROMPT, 7)
    (_, lease), _ = world.asked
    late = CheckResult(rollout_id=lease.rollout_id, below=np.zeros(3, np.float32), logprobs=np.zeros(3, np.float32))
    assert not world.scores.answered("b", late)
