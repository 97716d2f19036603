"""Sums and products of long numbers, written as `4821+977:`. The completion is a written calculation of any length,
then `<answer>5798</answer>`.

For base models that compute in columns, such as `builtin:small`. The calculation has one line for each digit, so
lengths of completions differ as much as lengths of problems.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from echo_hub.tasks.answers import tagged_answer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.options import TaskOptions

Operation = Literal["+", "*"]
_CALCULATE: Final[Mapping[Operation, Callable[[int, int], int]]] = {"+": operator.add, "*": operator.mul}


class WorkedOptions(TaskOptions):
    """Options that select the problems."""

    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] = ("+",)
    """Operations of the problems, drawn with equal probability."""
    shortest: Annotated[int, Field(ge=1, le=32)] = 1
    """Smallest number of digits of a term of a sum. The number of digits is uniformly distributed."""
    longest: Annotated[int, Field(ge=1, le=32)] = 8
    """Largest number of digits of a term of a sum."""
    longest_factor: Annotated[int, Field(ge=1, le=32)] = 3
    """Largest number of digits of a factor of a product. The smallest number is one."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest must be at most longest, got {self.shortest} and {self.longest}")
        return self


class WorkedTask:
    """One operation on two numbers. The reward is 1 if the answer is the exact result, else 0."""

    name = "worked"

    def __init__(self, options: WorkedOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed`. Its metadata holds the `answer`."""
        rng = random.Random(seed)
        operation = rng.choice(self._options.operations)
        fewest, most = (
            (self._options.shortest, self._options.longest) if operation == "+" else (1, self._options.longest_factor)
        )
        left, right = (_of_digits(rng.randint(fewest, most), rng) for _ in range(2))
        answer = _CALCULATE[operation](left, right)
        return Problem(prompt=f"{left}{operation}{right}:", metadata={"answer": str(answer)})

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1 for the exact result in the last `<answer>...</answer>`, else 0."""
        return float(tagged_answer(completion) == problem.metadata["answer"])


def _of_digits(digits: int, rng: random.Random) -> int:
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def make_worked(options: Mapping[str, Any]) -> WorkedTask:
    """Create the task. Raises ConfigError for an unknown or invalid option."""
    return WorkedTask(WorkedOptions.read("worked", options))
