"""Lessons of the small base model: problems of the hub's tasks with a teacher's solution, with or without mistakes.

At each point where it can, a careless teacher makes a mistake with probability `slips`, and continues as if the result
were right.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reasoning_gym.logic.knights_knaves import COMMON_NAMES, KNIGHT_KNAVE_PAIRS, TEMPLATES

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.sokoban import MOVES, SokobanBoard, solution
from echo_hub.tasks.registry import make_task

SOKOBAN: Final[Mapping[str, Any]] = {"size": 4, "inner_walls": 2, "boxes": 1}
KNIGHTS: Final[Mapping[str, Any]] = {"n_people": 2, "depth_constraint": 2, "width_constraint": 2}
TERM_DIGITS: Final = 8
FACTOR_DIGITS: Final = 3
DIGITS: Final = tuple("0123456789")
ROLES: Final = tuple(role.split()[1] for pair in KNIGHT_KNAVE_PAIRS for role in pair)
MOST_REMINDED: Final = 8
"""Maximum number of people in a reminder, a lesson that repeats facts about people."""
AGAIN: Final = 12
TEN: Final = 4
"""Factor by which the probability of dropping a carry grows if a column adds up to exactly ten. With this factor the
model makes the mistake even at temperature 0.
"""
ALL_STATEMENTS: Final = 0.5
"""Probability that `Statements` teaches all statements of a puzzle together."""


@dataclass(frozen=True, slots=True)
class Lesson:
    prompt: str
    completion: str
    reads: bool = False
    """True: the model learns to predict the prompt, too. This helps where a text repeats names: each line teaches the
    model to copy them.
    """


def worked_sum(rng: random.Random, slips: float) -> Lesson:
    """Return a lesson that adds column by column from the right. Each line has the remaining digits, the carry and the
    result.
    """
    left, right = (_number(rng.randint(1, TERM_DIGITS), rng) for _ in range(2))
    working, total = _columns(left, right, slips, rng)
    return Lesson(f"{left}+{right}:", f"\n{working}<answer>{total}</answer>")


def worked_product(rng: random.Random, slips: float) -> Lesson:
    """Return a lesson that multiplies one factor by each digit of the other, and adds up the partial products."""
    left, right = (_number(rng.randint(1, FACTOR_DIGITS), rng) for _ in range(2))
    lines: list[str] = []
    total = 0
    for place in range(len(str(right))):
        rest = str(right)[: len(str(right)) - place]
        part = _multiplied(left, int(rest[-1]), slips, rng, lines) * 10**place
        lines.append(f"{left}*{rest}:{part}\n")
        if place:
            working, total = _columns(total, part, slips, rng)
            lines.append(f"{working}{total}\n")
        else:
            total = part
    return Lesson(f"{left}*{right}:", f"\n{''.join(lines)}<answer>{total}</answer>")


def _multiplied(left: int, digit: int, slips: float, rng: random.Random, lines: list[str]) -> int:
    rest, carry, product = str(left), 0, ""
    while rest:
        carry_out, unit = divmod(int(rest[-1]) * digit + carry, 10)
        lines.append(f"{rest}*{digit}+{carry}={carry_out}{unit}\n")
        product = f"{unit}{product}"
        carry = 0 if carry_out and rng.random() < slips else carry_out
        rest = rest[:-1]
    return int(f"{carry}{product}")


def _columns(left: int, right: int, slips: float, rng: random.Random) -> tuple[str, int]:
    lines, digits, carry = [], "", 0
    one, other = str(left), str(right)
    while one or other:
        carry_out, unit = divmod(int(one[-1:] or 0) + int(other[-1:] or 0) + carry, 10)
        lines.append(f"{one or 0}+{other or 0}+{carry}={carry_out}{unit}\n")
        digits = f"{unit}{digits}"
        carry = 0 if carry_out and rng.random() < slips * (1 if unit else TEN) else carry_out
        one, other = one[:-1], other[:-1]
    return "".join(lines), int(f"{carry}{digits}")


def _number(digits: int, rng: random.Random) -> int:
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


class Knights:
    """Lessons for Knights and Knaves of reasoning-gym: the statements in signs, then one case after another.

    After the numbered names, `1: Aria2-` means that person 1 says that person 2, Aria, lies; `&`, `|`, `>` and `=` join
    two claims. Name and number stand together, so that the model copies both from one place. In a case, `1+2-:` assumes
    that person 1 is honest and person 2 lies. The value of each statement follows, until one contradicts its speaker
    (`x`), or all fit (`!`).
    """

    def __init__(self) -> None:
        self._task = make_task("reasoning-gym:knights_knaves", KNIGHTS)

    def __call__(self, rng: random.Random, slips: float) -> Lesson:
        problem, about = self._drawn(rng)
        cases, truthful = _cases(about["statements"], slips, rng)
        terms, names = about["knight_knave_terms"], about["names"]
        parts = [
            f"{name} is {terms['a_knight' if is_knight else 'a_knave']}"
            for name, is_knight in zip(names, truthful, strict=True)
        ]
        answer = ", ".join(parts[:-1]) + ", and " + parts[-1]
        said = _numbered(names) + "".join(_read(about))
        return Lesson(problem.prompt, f"\n{said}{cases}<answer>{answer}</answer>", reads=True)

    def _drawn(self, rng: random.Random) -> tuple[Problem, Mapping[str, Any]]:
        problem = self._task.sample(rng.getrandbits(64))
        return problem, problem.metadata["metadata"]


def reminders(rng: random.Random, slips: float) -> Lesson:
    """Return a lesson that states a fact about each of several people, then repeats some of the facts in another order.
    So the model learns to look facts up.
    """
    link, values = rng.choice((("", DIGITS), (" is a ", ROLES)))
    about = [f" {name}{link}{rng.choice(values)}" for name in rng.sample(COMMON_NAMES, rng.randint(2, MOST_REMINDED))]
    return Lesson("".join(about), "\n" + "".join(rng.choice(about) for _ in range(AGAIN)))


class Statements(Knights):
    """Shorter lessons for Knights and Knaves, without the fixed text of the puzzle: one translated statement, or all
    statements with the cases.
    """

    def __call__(self, rng: random.Random, slips: float) -> Lesson:
        problem, about = self._drawn(rng)
        names, read = about["names"], _read(about)
        met, _, said = problem.prompt[problem.prompt.index("You meet") : problem.prompt.index(" So who")].partition(".")
        if rng.random() < ALL_STATEMENTS:
            cases, _ = _cases(about["statements"], slips, rng)
            return Lesson(f"{met}.{said}", f"\n{_numbered(names)}{''.join(read)}{cases}", reads=True)
        (first,) = re.findall(rf"^ (?:{_first_said(names[0])})", said)
        alone, line = rng.choice(((first, read[0]), (said.removeprefix(first), read[1])))
        return Lesson(f"{met}.{alone}", f"\n{_numbered(names)}{line}", reads=True)


def _first_said(name: str) -> str:
    """Return a regular expression that finds a statement made by the person `name`."""
    texts = (re.escape(template.format(name=name, content="...")) for template in TEMPLATES)
    return "|".join(text.replace(re.escape("..."), "[A-Za-z ]+") for text in texts)


def _numbered(names: Sequence[str]) -> str:
    return "".join(f" {name}{number}" for number, name in enumerate(names, 1)) + "\n"


def _read(about: Mapping[str, Any]) -> list[str]:
    return [f"{number}:{_signs(one, about['names'])}\n" for number, one in enumerate(about["statements"], 1)]


def _cases(statements: Sequence[Any], slips: float, rng: random.Random) -> tuple[str, tuple[bool, ...]]:
    """Return the lines of all cases up to the first one that fits the statements, and that case: True for each honest
    person.
    """
    text = ""
    truthful: tuple[bool, ...] = ()
    for truthful in itertools.product((True, False), repeat=len(statements)):
        case, fits = _case(statements, truthful, slips, rng)
        text += case
        if fits:
            break
    return text, truthful


_JOINED: Final[Mapping[str, tuple[str, Callable[[bool, bool], bool]]]] = {
    "and": ("&", lambda one, other: one and other),
    "or": ("|", lambda one, other: one or other),
    "->": (">", lambda one, other: not one or other),
    "<=>": ("=", lambda one, other: one == other),
}


def _plain(statement: Any) -> Any:
    """Return the statement without its negation. In these puzzles only simple statements are negated."""
    if statement[0] != "not":
        return statement
    kind, person = statement[1]
    return ("lying" if kind == "telling-truth" else "telling-truth", person)


def _signs(statement: Any, names: Sequence[str]) -> str:
    kind, *parts = _plain(statement)
    if kind in _JOINED:
        return _JOINED[kind][0].join(_signs(part, names) for part in parts)
    return f" {names[parts[0]]}{parts[0] + 1}{'+' if kind == 'telling-truth' else '-'}"


def _case(statements: Sequence[Any], truthful: tuple[bool, ...], slips: float, rng: random.Random) -> tuple[str, bool]:
    text = "".join(f"{number}{'+' if one else '-'}" for number, one in enumerate(truthful, 1)) + ":"
    for number, statement in enumerate(statements):
        written, value = _value(statement, truthful, slips, rng)
        text += written
        if value != truthful[number]:
            return f"{text}x\n", False
        text += ";"
    return f"{text}!\n", True


def _value(statement: Any, truthful: tuple[bool, ...], slips: float, rng: random.Random) -> tuple[str, bool]:
    kind, *parts = _plain(statement)
    if kind not in _JOINED:
        value = truthful[parts[0]] == (kind == "telling-truth")
        value = value != (rng.random() < slips)
        return str(int(value)), value
    sign, join = _JOINED[kind]
    (one, other) = (_value(part, truthful, slips, rng) for part in parts)
    value = join(one[1], other[1]) != (rng.random() < slips)
    return f"{one[0]}{sign}{other[0]}={int(value)}", value


class Sokoban:
    """Lessons on Sokoban boards. In some of them, random moves come before the solution."""

    def __init__(self) -> None:
        self._task = make_task("environment:sokoban", SOKOBAN)

    def __call__(self, rng: random.Random, slips: float) -> Lesson:
        problem = self._task.sample(rng.getrandbits(64))
        board: SokobanBoard = problem.metadata["board"]
        prompt = problem.prompt
        for _ in range(rng.choice((0, 0, 1, 2))):
            moves = "".join(rng.choices(list(MOVES), k=rng.randint(1, 8)))
            after = board.played(moves)
            if after.solved or not solution(after):
                break
            board, prompt = after, f"{prompt}{moves}<eos>\n{after.text}:"
        moves = solution(board) or ""
        return Lesson(prompt, "".join(rng.choice(list(MOVES)) if rng.random() < slips else move for move in moves)[:8])
