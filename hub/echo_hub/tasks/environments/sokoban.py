"""Sokoban in rounds. The model sees a board, answers with moves, and sees the resulting board.

Boards use XSB notation with `-` for the floor: `#` wall, `@` player, `$` box, `.` goal, `*` box on a goal, `+` player
on a goal. Moves are U, D, L and R. A blocked move has no effect, and other characters are ignored. Every board is
solvable; solutions are found by breadth-first search.

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
from echo_shared.errors import ConfigError
from echo_shared.sampling.draws import derive_seed

Place = tuple[int, int]
"""A place on the board: (row, column), counted from 0 at the top left."""

MOVES: Final[Mapping[str, Place]] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
ATTEMPTS: Final = 2_000
"""Largest number of random boards that are tried for one problem, until a board meets the options."""
STATES: Final = 200_000
"""Largest number of board states that are searched for one problem, over all boards that are tried for it. The search
takes a few seconds at most."""
STATES_OF_BOARD: Final = 20_000
"""Largest number of states that are searched for the solution of one board. If a board needs more, it is rejected."""


@dataclass(frozen=True, slots=True)
class SokobanBoard:
    """Positions of the walls, the goals, the boxes and the player."""

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
        """The board as text, with one line for each row. Each line ends with a newline."""
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

    def moved(self, move: str) -> SokobanBoard:
        """Return the board after one move. If the move is blocked, return the same board."""
        down, right = MOVES[move]
        to = self.player[0] + down, self.player[1] + right
        beyond = to[0] + down, to[1] + right
        if to in self.walls or (to in self.boxes and (beyond in self.walls or beyond in self.boxes)):
            return self
        boxes = self.boxes - {to} | {beyond} if to in self.boxes else self.boxes
        return SokobanBoard(self.rows, self.columns, self.walls, self.goals, boxes, to)

    def played(self, moves: str) -> SokobanBoard:
        """Return the board after these moves. Moves after a solution are ignored."""
        board = self
        for move in moves:
            if board.solved:
                break
            if move in MOVES:
                board = board.moved(move)
        return board


def solution(board: SokobanBoard) -> str | None:
    """Return the shortest solution, or None if there is none. If there are several, return the first in the order U, D,
    L, R."""
    return _search(board, most_moves=None, most_states=None).moves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    moves: str | None
    states: int
    """Number of states that the search has visited."""


def _search(board: SokobanBoard, *, most_moves: int | None, most_states: int | None) -> _Searched:
    """Search breadth-first for a solution of at most `most_moves`. Give up after about `most_states` states."""
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
    """Options that set the difficulty."""

    size: Annotated[int, Field(ge=3, le=8)] = 4
    """Rows and columns inside the outer walls."""
    inner_walls: Annotated[int, Field(ge=0, le=16)] = 2
    """Largest number of walls inside the board."""
    boxes: Annotated[int, Field(ge=1, le=3)] = 1
    """Number of boxes, and of goals."""
    fewest_moves: Annotated[int, Field(ge=1, le=64)] = 2
    """Smallest length of the shortest solution, in moves."""
    most_moves: Annotated[int, Field(ge=1, le=64)] = 12
    """Largest length of the shortest solution, in moves."""
    turns: Annotated[int, Field(ge=1, le=16)] = 4
    """After this many rounds, the game is lost."""
    moves_a_turn: Annotated[int, Field(ge=1, le=64)] = 8
    """Largest number of moves in a round. Further moves of an answer are ignored."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.fewest_moves > self.most_moves:
            raise ValueError(f"fewest_moves must be at most most_moves, got {self.fewest_moves} and {self.most_moves}")
        return self


class SokobanEnvironment:
    """The reward is 1 for a solved board, in any round. A lost game gives 0.5 times the share by which the distance of
    the boxes from the goals became smaller. Each round earns the change of this share, times 0.5."""

    name = "environment:sokoban"

    def __init__(self, options: SokobanOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """Return the board of `seed`. Its metadata holds the `board` and the shortest solution, which is the `answer`.

        Raises ConfigError if no board meets the options.
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
        """Return the board after the last reply, or the episode's ending."""
        start: SokobanBoard = problem.metadata["board"]
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


def drawn(options: SokobanOptions, rng: random.Random) -> SokobanBoard | None:
    """Draw a random board, which may be unsolvable. Return None if it has too few free squares."""
    edge = options.size + 1
    inside = [(row, column) for row in range(1, edge) for column in range(1, edge)]
    outer = {(row, column) for row in range(edge + 1) for column in range(edge + 1)} - set(inside)
    inner = rng.sample(inside, rng.randint(0, min(options.inner_walls, len(inside) - 1)))
    free = [place for place in inside if place not in inner]
    if len(free) < 2 * options.boxes + 1:
        return None
    chosen = rng.sample(free, 2 * options.boxes + 1)
    goals, boxes = frozenset(chosen[: options.boxes]), frozenset(chosen[options.boxes : -1])
    return SokobanBoard(edge + 1, edge + 1, frozenset(outer | set(inner)), goals, boxes, chosen[-1])


def is_cornered(board: SokobanBoard) -> bool:
    """Return True if walls hold a box in a corner outside the goals."""
    return any(
        not board.walls.isdisjoint({(row - 1, column), (row + 1, column)})
        and not board.walls.isdisjoint({(row, column - 1), (row, column + 1)})
        for row, column in board.boxes - board.goals
    )


def distance(board: SokobanBoard) -> int:
    """Return the sum, over all boxes, of the number of steps to the nearest goal. Walls are ignored."""
    return sum(min(_steps(box, goal) for goal in board.goals) for box in board.boxes)


def _earned(board: SokobanBoard, start: SokobanBoard) -> float:
    """Return the reward of a game that is lost in the position `board`."""
    return 0.5 * max(0.0, 1 - distance(board) / max(1, distance(start)))


def _steps(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def make_sokoban(options: Mapping[str, Any]) -> SokobanEnvironment:
    """Create the environment. Raises ConfigError for an unknown or invalid option."""
    return SokobanEnvironment(SokobanOptions.read("environment:sokoban", options))
