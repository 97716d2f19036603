"""A reward is the weighted sum of its components, which come from settings and from tasks of every kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from echo_hub.config.reward_section import RewardConfig
from echo_hub.scoring.weighing import Weighing
from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending
from echo_hub.tasks.environments.guess import make_guess
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.records.rewards import components_of

PROBLEM = Problem(prompt="1+1=", metadata={"answer": "2"})


class Told:
    """A task that gives every answer the same reward."""

    name = "told"

    def __init__(self, components: Any, score: float = 1.0) -> None:
        self.given = components
        self.given_score = score

    def sample(self, seed: int) -> Problem:
        return PROBLEM

    def score(self, problem: Problem, completion: str) -> float:
        return self.given_score

    def components(self, problem: Problem, completion: str) -> Mapping[str, float]:
        return self.given  # type: ignore[no-any-return]


class Measured(Told):
    component_bounds: ClassVar[Any] = {"style": (-1.0, 1.0), "language": (0, 1)}
    component_weights: ClassVar[Any] = {"score": 2.0, "style": 0.5}


def weighing(task: Any = None, **settings: Any) -> Weighing:
    return Weighing.of(task or make_arithmetic({}), RewardConfig(**settings))


def earned(weighs: Weighing, task: Any, completion: str, num_tokens: int = 1) -> float:
    return weighs.total(weighs.scored(task, PROBLEM, completion, num_tokens))


def test_without_settings_the_reward_is_the_score_alone() -> None:
    task = make_arithmetic({})
    weighs = weighing(task)
    assert weighs.is_plain and weighs.rewards == RewardBounds()
    assert weighs.scored(task, PROBLEM, "2", 1) == 1.0
    assert components_of(earned(weighs, task, "2")) is None


def test_the_reward_is_the_weighted_sum_and_its_bounds_follow() -> None:
    task = make_arithmetic({})
    weighs = weighing(task, weights={"format": 0.25, "length": -0.5}, format=r"\d+", length_most=2, length_zero=4)
    assert (weighs.rewards.lowest, weighs.rewards.highest) == (-0.5, 1.25)
    reward = earned(weighs, task, "2", 3)
    assert reward == 1 + 0.25 - 0.25
    assert components_of(reward) == {"score": 1.0, "format": 1.0, "length": 0.5}
    assert earned(weighs, task, "two", 1) == -0.5


JUDGES = {
    "style": {"kind": "llm", "url": "http://127.0.0.1:1/v1", "model": "m"},
    "help": {"kind": "reward_model", "model": "m", "sigmoid": False, "lowest": -4, "highest": 4},
}


def test_judges_give_their_components_later_and_the_bounds_know_them() -> None:
    task = make_arithmetic({})
    weighs = weighing(task, weights={"style": 0.5, "help": 0.25}, judges=JUDGES)
    assert (weighs.rewards.lowest, weighs.rewards.highest) == (-1.0, 2.5)
    scored = weighs.scored(task, PROBLEM, "2", 1)
    assert scored == {"score": 1.0}
    assert weighs.total({"score": 1.0, "style": 0.5, "help": -2.0}) == 0.75
    unweighed = weighing(task, judges=JUDGES)
    assert not unweighed.is_plain and unweighed.rewards.highest == 1.0, "the judge's value is shown but earns nothing"
    with pytest.raises(ScorerError, match="cannot be the name"):
        weighing(told := Told({"style": 1.0}), judges=JUDGES).scored(told, PROBLEM, "2", 1)
    with pytest.raises(ConfigError, match="a name that another one has"):
        weighing(Measured({}), judges=JUDGES)


def test_the_task_decides_if_a_problem_is_solved() -> None:
    task = make_arithmetic({})
    weighs = weighing(task, weights={"score": 0.5, "format": 1.0}, format=r"[a-z]+")
    assert weighs.rewards.is_solved(earned(weighs, task, "2"))
    assert not weighs.rewards.is_solved(earned(weighs, task, "two"))
    assert earned(weighs, task, "two") > earned(weighs, task, "2")


def test_a_component_without_a_weight_is_shown_and_earns_nothing() -> None:
    task = Told({"speed": 17.5})
    reward = earned(weighing(task), task, "2")
    assert reward == 1.0 and components_of(reward) == {"score": 1.0, "speed": 17.5}
    beside = earned(weighing(format="x"), make_arithmetic({}), "2")
    assert beside == 1.0 and components_of(beside) == {"score": 1.0, "format": 0.0}


def test_a_task_weighs_its_components_itself_until_the_settings_do() -> None:
    task = Measured({"style": -1.0, "language": 1.0})
    assert earned(weighing(task), task, "2") == 2 - 0.5
    assert weighing(task).rewards == RewardBounds(lowest=-0.5, highest=2.5, of_score=RewardBounds())
    assert earned(weighing(task, weights={"style": 0.0, "language": 3.0}), task, "2") == 5


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, -1.5, "1", None, [1]])
def test_a_value_out_of_its_bounds_is_the_scorers_failure(value: Any) -> None:
    task = Measured({"style": value, "language": 0.0})
    with pytest.raises(ScorerError, match="component style"):
        weighing(task).scored(task, PROBLEM, "2", 1)
    unweighed = Told({"style": value})
    if value in (1.5, -1.5):
        assert weighing(unweighed).scored(unweighed, PROBLEM, "2", 1) == {"score": 1.0, "style": value}
    else:
        with pytest.raises(ScorerError, match="component style"):
            weighing(unweighed).scored(unweighed, PROBLEM, "2", 1)


@pytest.mark.parametrize(
    "components",
    [
        {"score": 1.0},
        {"": 1.0},
        {1: 1.0},
        {"<b>": 1.0},
        {"a" * 33: 1.0},
        {f"c{number}": 0.0 for number in range(33)},
        ["style"],
        None,
    ],
)
def test_components_that_are_no_mapping_are_the_scorers_failure(components: Any) -> None:
    task = Told(components)
    with pytest.raises(ScorerError):
        weighing(task).scored(task, PROBLEM, "2", 1)


def test_a_missing_weighted_component_is_the_scorers_failure() -> None:
    task = Told({"style": 1.0})
    with pytest.raises(ScorerError, match="no component language"):
        weighing(task, weights={"language": 1.0}).scored(task, PROBLEM, "2", 1)


def test_settings_that_do_not_fit_the_task_are_refused() -> None:
    with pytest.raises(ConfigError, match="a component that the task does not have"):
        weighing(weights={"style": 1.0})
    with pytest.raises(ConfigError, match="a component that the task does not have"):
        weighing(Measured({}), weights={"colour": 1.0})
    with pytest.raises(ConfigError, match="all rewards equal, or too large"):
        weighing(weights={"score": 0.0})
    with pytest.raises(ConfigError, match="name that another one has"):
        weighing(type("Bad", (Measured,), {"component_bounds": {"format": (0, 1)}})({}), format="x")


@pytest.mark.parametrize("bounds", [{"style": (1, 0)}, {"style": (0, math.inf)}, {"a b": (0, 1)}, 3, {"style": None}])
def test_invalid_bounds_are_refused(bounds: Any) -> None:
    with pytest.raises(ConfigError, match="bounds of the task's reward components"):
        weighing(type("Bad", (Measured,), {"component_bounds": bounds})({}))


@pytest.mark.parametrize("weights", [{"style": "much"}, {"style": math.nan}, {"style": 1e9}, {"": 1.0}])
def test_invalid_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="weights of the task's reward components"):
        weighing(type("Bad", (Measured,), {"component_weights": weights})({}))


def test_an_environments_end_has_components_too_and_a_cut_the_lowest() -> None:
    weighs = weighing(make_guess({}), weights={"turns": 0.5}, tagged="answer")
    ending = Ending(reward=1.0, components={"turns": 0.5})
    assert weighs.total(weighs.ended(ending, ["1", "<answer>2</answer>"], 9)) == 1.25
    assert weighs.cut(0.0, ["1"], 1) == {"score": 0.0, "turns": 0.0, "tagged": 0.0}
    plain = weighing(make_guess({}))
    assert plain.ended(Ending(reward=1.0), ["2"], 1) == 1.0
    assert plain.cut(0.5, ["2"], 1) == 0.5
