"""Sokoban in rounds: the model is shown a board, answers with moves, and is shown the board that they lead to.

A board is drawn as in XSB, with `-` for the floor: `#` wall, `@` who moves, `$` box, `.` goal, `*` box on a goal, `+`
who moves on a goal. Moves are U, D, L and R; a move against a wall, or of a box that cannot be pushed, does nothing,
and what is no move is passed over. Every board can be solved, and how is found by breadth-first search.

Source of the task: Echo (arXiv 2508.05387), which plays four rounds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Response
from echo_hub.tasks.options import TaskOptions
from echo_shared.draws import derive_seed
from echo_shared.errors import ConfigError

Place = tuple[int, int]
"""Row and column."""

MOVES: Final[Mapping[str, Place]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
ATTEMPTS: Final = 2_000
"""Boards that are drawn in search of one that fits."""
STATES: Final = 200_000
"""That are met in search of a board that fits, all in all: seconds, whatever the options."""
STATES_OF_BOARD: Final = 20_000
"""That are met in search of one board's solution; a board whose solution is farther away is not drawn."""


@dataclass(frozen=True, slots=True)
class Board:
    """Where everything is."""

    rows: int
    columns: int
    walls: frozenset[Place]
    goals: frozenset[Place]
    boxes: frozenset[Place]
    player: Place

    @property
    def solved(self) -> bool:
        return self.boxes == self.goals

    @property
    def text(self) -> str:
        """A line a row, each with its end."""
        return "".join("".join(map(self._mark, self._row(row))) + "\n" for row in range(self.rows))

    def _row(self, row: int) -> list[Place]:
        return [(row, column) for column in range(self.columns)]

    def _mark(self, place: Place) -> str:
        is_goal = place in self.goals
        if place in self.walls:
            return "#"
        if place in self.boxes:
            return "*" if is_goal else "$"
        if place == self.player:
            return "+" if is_goal else "@"
        return "." if is_goal else "-"

    def moved(self, move: str) -> Board:
        """After one move; itself, if it does nothing."""
        down, right = MOVES[move]
        to = self.player[0] + down, self.player[1] + right
        beyond = to[0] + down, to[1] + right
        if to in self.walls or (to in self.boxes and (beyond in self.walls or beyond in self.boxes)):
            return self
        boxes = self.boxes - {to} | {beyond} if to in self.boxes else self.boxes
        return Board(self.rows, self.columns, self.walls, self.goals, boxes, to)

    def played(self, moves: str) -> Board:
        """After these moves, or those up to the solution."""
        board = self
        for move in moves:
            if board.solved:
                break
            if move in MOVES:
                board = board.moved(move)
        return board


def solution(board: Board) -> str | None:
    """The fewest moves that solve it, of several the first in the order U, D, L, R; None: nothing does."""
    return _search(board, most_moves=None, most_states=None).moves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    moves: str | None
    states: int
    """How many were met on the way."""


def _search(board: Board, *, most_moves: int | None, most_states: int | None) -> _Searched:
    """Breadth-first; without a solution, too, where one has more moves or is not found among so many states."""
    came: dict[tuple[Place, frozenset[Place]], str] = {(board.player, board.boxes): ""}
    if board.solved:
        return _Searched(moves="", states=1)
    waiting = deque([board])
    while waiting and (most_states is None or len(came) < most_states):
        now = waiting.popleft()
        moves = came[now.player, now.boxes]
        if len(moves) == most_moves:
            break
        for move in MOVES:
            then = now.moved(move)
            if (then.player, then.boxes) in came:
                continue
            if then.solved:
                return _Searched(moves=moves + move, states=len(came))
            came[then.player, then.boxes] = moves + move
            waiting.append(then)
    return _Searched(moves=None, states=len(came))


class SokobanOptions(TaskOptions):
    """How hard it is."""

    size: Annotated[int, Field(ge=3, le=8)] = 4
    """Rows and columns within the outer walls."""
    inner_walls: Annotated[int, Field(ge=0, le=16)] = 2
    """At most."""
    boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """As many as goals."""
    fewest_moves: Annotated[int, Field(ge=1, le=64)] = 2
    """Of the shortest solution."""
    most_moves: Annotated[int, Field(ge=1, le=64)] = 12
    """Of the shortest solution."""
    turns: Annotated[int, Field(ge=1, le=16)] = 4
    """Rounds, after which the game is lost."""
    moves_a_turn: Annotated[int, Field(ge=1, le=64)] = 8
    """What a round's answer has beyond them is passed over."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.fewest_moves > self.most_moves:
            raise ValueError(f"fewest_moves must be at most most_moves, got {self.fewest_moves} and {self.most_moves}")
        return self


class SokobanEnvironment:
    """The reward is 1 for a solved board, however late. A lost game earns up to 0.5: a box on its goal counts, and how
    much nearer to the goals the others are than at the start. Of that, each round earns what it has changed."""

    name = "environment:sokoban"

    def __init__(self, options: SokobanOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """The board of `seed`, which its metadata holds, with the shortest solution, its `answer`.

        Raises ConfigError where no board fits the options.
        """
        left = STATES
        for attempt in range(ATTEMPTS):
            board = drawn(self._options, random.Random(derive_seed("sokoban", seed, attempt)))
            if board is None or is_cornered(board):
                continue
            found = _search(board, most_moves=self._options.most_moves, most_states=min(left, STATES_OF_BOARD))
            if found.moves is not None and len(found.moves) >= self._options.fewest_moves:
                return Problem(prompt=f"{board.text}:", metadata={"board": board, "answer": found.moves})
            left -= found.states
            if left <= 0:
                break
        raise ConfigError(
            "No Sokoban board fits these options.",
            got=f"task.options = {self._options.model_dump()}, {attempt + 1} boards drawn",
            do="Allow more moves or fewer boxes and walls, or make the board larger.",
        )

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """The board after the last reply, or the end."""
        start: Board = problem.metadata["board"]
        board = before = start
        for reply in replies:
            before = board
            board = board.played("".join(move for move in reply if move in MOVES)[: self._options.moves_a_turn])
        if board.solved:
            return Ending(reward=1.0)
        earned = _earned(board, start)
        if len(replies) == self._options.turns:
            return Ending(reward=earned)
        gained = earned - _earned(before, start)
        return Observation(text=f"\n{board.text}:", reward_if_cut=earned, turn_reward=gained)


def drawn(options: SokobanOptions, rng: random.Random) -> Board | None:
    """Any board, solvable or not; None: there is no room for all."""
    edge = options.size + 1
    inside = [(row, column) for row in range(1, edge) for column in range(1, edge)]
    outer = {(row, column) for row in range(edge + 1) for column in range(edge + 1)} - set(inside)
    inner = rng.sample(inside, rng.randint(0, min(options.inner_walls, len(inside) - 1)))
    free = [place for place in inside if place not in inner]
    if len(free) < 2 * options.boxes + 1:
        return None
    chosen = rng.sample(free, 2 * options.boxes + 1)
    goals, boxes = frozenset(chosen[: options.boxes]), frozenset(chosen[options.boxes : -1])
    return Board(edge + 1, edge + 1, frozenset(outer | set(inner)), goals, boxes, chosen[-1])


def is_cornered(board: Board) -> bool:
    """Whether a box is off its goal in a corner of walls, where nothing moves it any more."""
    return any(
        not board.walls.isdisjoint({(row - 1, column), (row + 1, column)})
        and not board.walls.isdisjoint({(row, column - 1), (row, column + 1)})
        for row, column in board.boxes - board.goals
    )


def distance(board: Board) -> int:
    """Steps from each box to the nearest goal, walls aside, added up."""
    return sum(min(_steps(box, goal) for goal in board.goals) for box in board.boxes)


def _earned(board: Board, start: Board) -> float:
    """What a game earns that is lost with this board."""
    return 0.5 * max(0.0, 1 - distance(board) / max(1, distance(start)))


def _steps(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def make_sokoban(options: Mapping[str, Any]) -> SokobanEnvironment:
    """The environment by its options. Raises ConfigError for an option that does not exist or does not fit."""
    return SokobanEnvironment(SokobanOptions.read("environment:sokoban", options))
