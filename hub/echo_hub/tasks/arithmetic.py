"""Sums, differences and products of whole numbers, written as `123+456=`. The completion must be only the number.

Simple enough for `builtin:tiny`, which has learned three-digit additions and often forgets to carry.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from echo_hub.tasks.base import Problem
from echo_hub.tasks.options import TaskOptions

Operation = Literal["+", "-", "*"]
_CALCULATE: Final[Mapping[Operation, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class ArithmeticOptions(TaskOptions):
    """Options that select the problems."""

    digits: Annotated[int, Field(ge=1, le=18)] = 3
    """Digits of both operands. Numbers of several digits never start with a zero."""
    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] = ("+",)
    """Operations of the problems, drawn with equal probability."""


class ArithmeticTask:
    """One operation on two numbers. The reward is 1 for the exact result, and 0 for anything else."""

    name = "arithmetic"

    def __init__(self, options: ArithmeticOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed`. Its metadata holds the `answer`."""
        rng = random.Random(seed)
        digits = self._options.digits
        lowest = 0 if digits == 1 else 10 ** (digits - 1)
        left, right = rng.randrange(lowest, 10**digits), rng.randrange(lowest, 10**digits)
        operation = rng.choice(self._options.operations)
        answer = _CALCULATE[operation](left, right)
        return Problem(prompt=f"{left}{operation}{right}=", metadata={"answer": str(answer)})

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1 for the exact result, else 0. Surrounding white space is ignored; any other text gives 0."""
        return float(completion.strip() == problem.metadata["answer"])


def make_arithmetic(options: Mapping[str, Any]) -> ArithmeticTask:
    """Create the task. Raises ConfigError for an unknown or invalid option."""
    return ArithmeticTask(ArithmeticOptions.read("arithmetic", options))
