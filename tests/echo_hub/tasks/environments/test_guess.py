from __future__ import annotations

from typing import Any

import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation
from echo_hub.tasks.environments.guess import make_guess
from echo_shared.errors import ConfigError


def game(low: int, high: int, hidden: int) -> Problem:
    return Problem(prompt=f"{low}-{high}=", metadata={"low": low, "high": high, "hidden": hidden})


def test_a_game_depends_on_its_seed_alone() -> None:
    environment = make_guess({"digits": 2})
    games = [environment.sample(seed) for seed in range(300)]
    assert games == [environment.sample(seed) for seed in range(300)]
    for each in games:
        low, high, hidden = (each.metadata[name] for name in ("low", "high", "hidden"))
        assert each.prompt == f"{low}-{high}="
        assert 10 <= low <= hidden <= high <= 99 and 2 <= high - low + 1 <= 7
    assert {make_guess({}).sample(seed).metadata["hidden"] for seed in range(300)} == set(range(10))


def test_hints_lead_to_the_number() -> None:
    environment, problem = make_guess({}), game(2, 8, hidden=6)
    assert environment.respond(problem, ["5"]) == Observation(text=">=", reward_if_cut=0.5 * (1 - 1 / 6))
    assert environment.respond(problem, ["5", "8"]) == Observation(
        text="<=", reward_if_cut=0.5 * (1 - 2 / 6), turn_reward=1 / 2 - 1
    )
    assert environment.respond(problem, ["5", "8", " 6\n"]) == Ending(reward=1.0)
    assert environment.respond(problem, ["6"]) == Ending(reward=1.0)


@pytest.mark.parametrize("reply", ["", "x", "9", "1", "06", "6.", "six", "-6", "٦"])
def test_a_reply_without_a_number_in_range_wastes_a_turn(reply: str) -> None:
    environment, problem = make_guess({}), game(2, 8, hidden=6)
    assert environment.respond(problem, [reply]) == Observation(text="?=", turn_reward=3 / 7 - 1)
    assert environment.respond(problem, ["5", "5", reply]) == Ending(reward=0.0)


@pytest.mark.parametrize(
    ("replies", "left"),
    [
        (["5"], 3 / 3),
        (["2"], 3 / 6),
        (["8"], 3 / 6),
        (["5", "7"], 1 / 1),
        (["5", "8"], 1 / 2),
        (["5", "2"], 1 / 3),
        (["x", "5"], 1 / 3),
    ],
)
def test_a_turn_earns_its_change_of_the_chance_of_winning(replies: list[str], left: float) -> None:
    """With g guesses left, 2**g - 1 numbers can be told apart, so with n possible numbers the chance of winning is
    (2**g - 1) / n, at first 7 / 7. A turn earns the change of this chance.
    """
    environment, problem = make_guess({}), game(2, 8, hidden=6)
    earned = [environment.respond(problem, replies[:count]) for count in range(1, len(replies) + 1)]
    assert 1 + sum(answer.turn_reward for answer in earned if isinstance(answer, Observation)) == pytest.approx(left)


def test_a_lost_game_earns_the_more_the_nearer_it_ended() -> None:
    environment, problem = make_guess({"turns": 2}), game(0, 4, hidden=0)
    assert [environment.respond(problem, ["4", last]) for last in ("1", "2", "4")] == [
        Ending(reward=0.375),
        Ending(reward=0.25),
        Ending(reward=0.0),
    ]


@pytest.mark.parametrize(("options", "named"), [({"numbers": 1}, "numbers"), ({"size": 3}, "size")])
def test_options_that_do_not_fit_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)environment:guess.*task\.options\.{named}"):
        make_guess(options)
