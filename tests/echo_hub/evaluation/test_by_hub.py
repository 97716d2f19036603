"""Evaluations by the hub itself. Sampling and scoring are scripted here; test_trainer, test_export and test_hub use the
real ones."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_hub.evaluation.by_hub import (
    Generated,
    HeldOut,
    Ids,
    Played,
    drawn_by,
    evaluate,
    evaluate_sets,
)
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.run import EvaluationKind
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason

Answer = float | Ids | ScorerError


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


class Engine:
    """A sampler that records its requests. Each completion is the tokens [group, index, version]."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, list[GroupRequest]]] = []

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        self.asked.append((greedy, list(requests)))
        rollouts = [
            FinishedRollout(
                lease_id=request.lease_id,
                group_id=request.group_id,
                index=index,
                policy_version=request.policy_version,
                completion_ids=ids(request.group_id, index, request.policy_version),
                behavior_logprobs=np.zeros(3, np.float32),
                finish_reason=FinishReason.LENGTH if index == 1 else FinishReason.STOP,
                sampling_s=0.0,
            )
            for request in requests
            for index in request.indices
        ]
        return Generated(rollouts=rollouts[::-1], seconds=1.5)


def heldout(problems: int, samples: int) -> HeldOut:
    return HeldOut(
        prompts=[ids(7, number) for number in range(problems)],
        run_seed=3,
        samples=samples,
        temperature=0.8,
        max_tokens=5,
        stop_ids=(1,),
        rewards=RewardBounds(),
    )


def judged(answer: Callable[[int, Sequence[Ids]], Answer]) -> Callable[..., Awaitable[list[Answer]]]:
    async def judge(played: Sequence[Played]) -> list[Answer]:
        return [answer(number, turns) for number, turns, _ in played]

    return judge


async def test_every_figure_by_hand() -> None:
    engine = Engine()

    def solves(number: int, turns: Sequence[Ids]) -> float:
        index = int(turns[-1][1])
        return {0: 1.0, 1: 1.0 if index == 0 else 0.25, 2: 0.0}[number]

    greedy, sampled = await evaluate(9, heldout(3, 4), generate=engine, judge=judged(solves))
    assert (greedy.kind, greedy.policy_version, greedy.samples, greedy.num_problems) == (EvaluationKind.GREEDY, 9, 1, 3)
    assert (greedy.accuracy, greedy.mean_reward, greedy.pass_at) == (pytest.approx(2 / 3), pytest.approx(2 / 3), {})
    assert greedy.accuracy_error == pytest.approx(math.sqrt((2 / 9) * 3 / 2 / 3))
    assert (greedy.share_truncated, greedy.mean_tokens, greedy.seconds) == (0.0, 3.0, 1.5)
    assert (sampled.kind, sampled.samples, sampled.num_unscored) == (EvaluationKind.SAMPLED, 4, 0)
    assert sampled.accuracy == pytest.approx((1 + 0.25 + 0) / 3), "mean@4"
    assert sampled.accuracy_error == pytest.approx(float(np.std([1, 0.25, 0], ddof=1)) / math.sqrt(3))
    assert sampled.mean_reward == pytest.approx((1 + (1 + 3 * 0.25) / 4 + 0) / 3)
    assert sampled.pass_at == {2: pytest.approx((1 + 0.5 + 0) / 3), 4: pytest.approx(2 / 3)}
    assert sampled.share_truncated == 0.25


async def test_several_sets_are_drawn_with_seeds_of_their_own() -> None:
    engine = Engine()
    sets = [replace(heldout(2, 0), name="a"), replace(heldout(3, 2), name="b", first=2, weight=0.0)]
    found = await evaluate_sets(5, sets, generate=engine, judge=judged(lambda number, turns: float(number < 3)))
    assert [(one.name, one.accuracy) for one in found] == [
        ("", 1.0),
        ("a", 1.0),
        ("b", pytest.approx(1 / 3)),
        ("b", pytest.approx(1 / 3)),
    ], "a set of weight 0 is in no mean"
    assert len({request.seed for _, requests in engine.asked for request in requests}) == 5


async def test_versions_are_drawn_with_the_same_seeds_and_problems_with_others() -> None:
    engine = Engine()
    for version in (0, 7):
        await evaluate(version, heldout(3, 2), generate=engine, judge=judged(lambda number, turns: 1.0))
    assert [greedy for greedy, _ in engine.asked] == [True, False, True, False]
    for _, requests in engine.asked:
        assert len({request.seed for request in requests}) == 3
        assert {request.temperature for request in requests} == {0.8}
    seeds = [[request.seed for request in requests] for _, requests in engine.asked]
    assert seeds[0] == seeds[1] == seeds[2] == seeds[3]
    versions = [{request.policy_version for request in requests} for _, requests in engine.asked]
    assert versions == [{0}, {0}, {7}, {7}]
    assert [request.indices for request in engine.asked[1][1]] == [(0, 1)] * 3, "a problem's prompt is computed once"


async def test_an_episode_is_played_to_its_end() -> None:
    """The prompt of each turn is the conversation so far. Here the episode of problem n ends after n + 1 turns."""
    engine = Engine()

    def answer(number: int, turns: Sequence[Ids]) -> Answer:
        return float(len(turns) == 2) if len(turns) > number else ids(50, len(turns))

    (greedy, sampled) = await evaluate(4, heldout(3, 2), generate=engine, judge=judged(answer))
    assert greedy.accuracy == sampled.accuracy == pytest.approx(1 / 3)
    assert sampled.mean_tokens == pytest.approx(3 * (1 + 2 + 3) / 3)
    assert sampled.seconds == 3 * 1.5
    turns = [requests for greedy, requests in engine.asked if not greedy]
    assert [len(requests) for requests in turns] == [3, 4, 2], (
        "from the second turn on, each episode has its own prompt"
    )
    last = turns[2][1]
    assert last.indices == (1,)
    assert last.prompt_ids.tolist() == [7, 2, 2, 1, 4, 50, 1, 2, 1, 4, 50, 2]
    assert len({request.seed for requests in turns for request in requests if request.group_id == 2}) == 3


async def test_a_scorer_that_fails_is_no_reward() -> None:
    def answer(number: int, turns: Sequence[Ids]) -> Answer:
        index = int(turns[-1][1])
        return ScorerError("The scorer failed.") if number == 0 or (number == 1 and index > 0) else 1.0

    greedy, sampled = await evaluate(1, heldout(3, 4), generate=Engine(), judge=judged(answer))
    assert (greedy.accuracy, greedy.num_problems, greedy.num_unscored) == (1.0, 2, 1)
    assert (sampled.accuracy, sampled.num_problems, sampled.num_unscored) == (1.0, 2, 4 + 3)
    assert sampled.pass_at == {2: 1.0, 4: 1.0}, "of the only problem with that many samples"
    failing = judged(lambda number, turns: ScorerError("The scorer failed."))
    with pytest.raises(ScorerError, match=r"(?s)None of the held-out completions.*3 completions by version 2"):
        await evaluate(2, heldout(3, 0), generate=Engine(), judge=failing)


async def test_a_version_is_evaluated_with_its_adapter(tmp_path: Path) -> None:
    asked: list[Path | None] = []

    class Versions:
        async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
            asked.append(adapter)
            return await Engine()(requests, greedy=greedy)

    adapters = {0: None, 12: tmp_path / "adapter"}
    for version, adapter in adapters.items():
        generate = drawn_by(Versions(), adapter)
        await evaluate(version, heldout(1, 0), generate=generate, judge=judged(lambda number, turns: 0.0))
    assert asked == [None, tmp_path / "adapter"]
