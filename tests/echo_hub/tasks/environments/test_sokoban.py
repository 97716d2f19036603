from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments import sokoban
from echo_hub.tasks.environments.base import Ending, Observation
from echo_hub.tasks.environments.sokoban import MOVES, SokobanBoard, is_cornered, make_sokoban, solution
from echo_shared.errors import ConfigError


def board(*rows: str) -> SokobanBoard:
    places = {(row, column): mark for row, line in enumerate(rows) for column, mark in enumerate(line)}
    at = {marks: frozenset(place for place, mark in places.items() if mark in marks) for marks in ("#", ".*+", "$*")}
    (player,) = (place for place, mark in places.items() if mark in "@+")
    return SokobanBoard(len(rows), len(rows[0]), at["#"], at[".*+"], at["$*"], player)


ROOM = board("######", "#@---#", "#-$-.#", "#----#", "######")


def game(of: SokobanBoard = ROOM) -> Problem:
    return Problem(prompt=f"{of.text}:", metadata={"board": of})


def test_a_board_depends_on_its_seed_alone_and_its_answer_solves_it() -> None:
    environment = make_sokoban({})
    problems = [environment.sample(seed) for seed in range(60)]
    assert problems == [environment.sample(seed) for seed in range(60)]
    assert len({problem.prompt for problem in problems}) == 60
    for problem in problems:
        drawn: SokobanBoard = problem.metadata["board"]
        moves: str = problem.metadata["answer"]
        assert problem.prompt == f"{drawn.text}:" and board(*drawn.text.split()) == drawn
        assert 2 <= len(moves) <= 12 and drawn.played(moves).solved and not drawn.played(moves[:-1]).solved
        shorter = ("".join(each) for each in product(MOVES, repeat=min(4, len(moves) - 1)))
        assert not any(drawn.played(each).solved for each in shorter)


def test_moves_follow_the_rules_of_the_game() -> None:
    assert ROOM.played("RDR").text == ROOM.played("R").played("D").played("R").text
    assert ROOM.played("DR") == board("######", "#----#", "#-@$.#", "#----#", "######")
    assert ROOM.played("DRR") == board("######", "#----#", "#--@*#", "#----#", "######")
    assert ROOM.played("U") == ROOM == ROOM.played("L"), "a wall"
    assert ROOM.played("RDD").played("D") == ROOM.played("RDD"), "a box at a wall is not pushed"
    two = board("######", "#@$$.#", "#---.#", "######")
    assert two.played("R") == two, "nor are two boxes"
    assert ROOM.played("DRRRRR") == ROOM.played("DRR"), "moves after the solution do not count"


def test_a_board_without_a_solution_has_none() -> None:
    assert solution(cornered := board("#####", "#@-.#", "#$--#", "#####")) is None, "the box is in a corner"
    assert is_cornered(cornered) and not is_cornered(ROOM)
    assert solution(board("######", "#$-@.#", "######")) is None, "no position allows a push"
    assert solution(ROOM) == "DRR" and solution(ROOM.played("DRR")) == ""


def test_a_round_continues_on_the_last_board() -> None:
    environment = make_sokoban({"turns": 3})
    first = environment.respond(game(), ["D"])
    assert first == Observation(text=f"\n{ROOM.played('D').text}:", reward_if_cut=0.0)
    assert environment.respond(game(), ["D", "R"]) == Observation(
        text=f"\n{ROOM.played('DR').text}:", reward_if_cut=0.25, turn_reward=0.25
    )
    assert environment.respond(game(), ["DR", "L"]) == Observation(
        text=f"\n{ROOM.played('DRL').text}:", reward_if_cut=0.25
    ), "a reward is earned only once"
    assert environment.respond(game(), ["D", "R", "R"]) == Ending(reward=1.0)
    assert environment.respond(game(), ["D", "R", "L"]) == Ending(reward=0.25)


@pytest.mark.parametrize("reply", ["", "drr", "no idea", "<>", game().prompt, "UUUU", "\x00", "é" * 10_000])
def test_moves_that_bring_no_box_nearer_earn_nothing(reply: str) -> None:
    assert make_sokoban({"turns": 1}).respond(game(), [reply]) == Ending(reward=0.0)


def test_only_a_rounds_first_moves_count() -> None:
    short = make_sokoban({"moves_a_turn": 2, "turns": 1})
    assert short.respond(game(), ["D, R, R!"]) == Ending(reward=0.25)
    assert short.respond(game(), ["DRR" * 100_000]) == Ending(reward=0.25)
    assert make_sokoban({"turns": 1}).respond(game(), ["D, R, R!"]) == Ending(reward=1.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 2}, "size"),
        ({"walls": 3}, "walls"),
        ({"turns": 0}, "turns"),
        ({"fewest_moves": 13}, "fewest_moves must be"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)environment:sokoban.*{named}"):
        make_sokoban(options)


def test_options_without_a_possible_board_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)No Sokoban board fits.*fewest_moves"):
        make_sokoban({"size": 3, "fewest_moves": 60, "most_moves": 64}).sample(0)


@pytest.mark.parametrize("size", [6, 8])
def test_a_board_is_found_or_given_up_without_searching_through_all_that_boxes_can_do(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    played = 0
    moved = SokobanBoard.moved

    def counted(board: SokobanBoard, move: str) -> SokobanBoard:
        nonlocal played
        played += 1
        return moved(board, move)

    monkeypatch.setattr(sokoban, "STATES", 4_000)
    monkeypatch.setattr(sokoban, "STATES_OF_BOARD", 1_000)
    monkeypatch.setattr(SokobanBoard, "moved", counted)
    hard = make_sokoban({"size": size, "boxes": 3, "inner_walls": 0, "fewest_moves": 60, "most_moves": 64})
    with pytest.raises(ConfigError, match="No Sokoban board fits"):
        hard.sample(0)
    assert 4_000 <= played <= 5 * 4_000


def test_more_boxes_are_more_goals() -> None:
    drawn: SokobanBoard = make_sokoban({"boxes": 2, "size": 5}).sample(3).metadata["board"]
    assert len(drawn.goals) == len(drawn.boxes) == 2 and not drawn.solved
