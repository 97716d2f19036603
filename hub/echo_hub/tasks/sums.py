"""Questions such as `What is 17 + 8?`, for language models that read English.

The last number in the completion is the answer, so both `25` and `17 + 8 = 25` are right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from echo_hub.tasks.base import Problem
from echo_hub.tasks.options import TaskOptions

Operation = Literal["+", "-"]
_NUMBER: Final = re.compile(r"-?\d+(?:[.,]\d+)*")


class SumsOptions(TaskOptions):
    """Options that select the problems."""

    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] = ("+",)
    """Operations of the problems, drawn with equal probability."""
    smallest: Annotated[int, Field(ge=0, le=10**9)] = 1
    """Smallest term of a sum. A difference is a sum minus one of its terms."""
    largest: Annotated[int, Field(ge=0, le=10**9)] = 20
    """Largest term of a sum."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.smallest > self.largest:
            raise ValueError(f"smallest must be at most largest, got {self.smallest} and {self.largest}")
        return self


class SumsTask:
    """A sum or a difference, as a question. The reward is 1 for the exact result, else 0.

    The numbers determine the text, so training never sees a held-out sum.
    """

    name = "sums"

    def __init__(self, options: SumsOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed`. Its metadata holds the `answer`."""
        rng = random.Random(seed)
        operation = rng.choice(self._options.operations)
        first, second = (rng.randint(self._options.smallest, self._options.largest) for _ in range(2))
        shown, answer = (first, first + second) if operation == "+" else (first + second, first)
        return Problem(prompt=f"What is {shown} {operation} {second}?", metadata={"answer": str(answer)})

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1 if the last number in the completion is the exact result, else 0."""
        numbers = _NUMBER.findall(completion)
        return float(numbers[-1:] == [problem.metadata["answer"]])


def make_sums(options: Mapping[str, Any]) -> SumsTask:
    """Create the task. Raises ConfigError for an unknown or invalid option."""
    return SumsTask(SumsOptions.read("sums", options))
