"""The problems of a run: an endless training stream, and a held-out set that shares no prompt with it.

The held-out set depends on the task alone, so that every run of a task, whatever its seed, is judged by the same
problems. A training problem depends on the task, the run's seed, its number, and on the held-out set that it avoids.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from typing import Final

from echo_hub.tasks.base import Problem, Task
from echo_shared.draws import derive_seed
from echo_shared.errors import ConfigError

MAX_ATTEMPTS: Final = 1_000
"""Hashed attempts at one problem before the task counts as too small."""


class ProblemStream:
    """`train(n)` and `heldout(n)`: the same problem for the same number, in any order, on any day."""

    def __init__(self, task: Task, *, run_seed: int, heldout_problems: int) -> None:
        self._task = task
        self._run_seed = run_seed
        self._heldout_problems = heldout_problems

    def train(self, number: int) -> Problem:
        """Problem `number` (0, 1, ...) of the training stream; prompts may repeat, held-out ones never appear.

        Raises ConfigError when the task has no prompt left beside the held-out ones.
        """
        return self._first_outside(self._heldout_prompts, "train", self._run_seed, number)

    def heldout(self, number: int) -> Problem:
        """Problem `number` (0 .. heldout_problems - 1) of the held-out set; all prompts differ.

        Raises ConfigError when the task is too small for the set.
        """
        return self._heldout[number]

    @cached_property
    def _heldout(self) -> tuple[Problem, ...]:
        problems: dict[str, Problem] = {}
        for number in range(self._heldout_problems):
            problem = self._first_outside(problems, "heldout", number)
            problems[problem.prompt] = problem
        return tuple(problems.values())

    @cached_property
    def _heldout_prompts(self) -> frozenset[str]:
        return frozenset(problem.prompt for problem in self._heldout)

    def _first_outside(self, taken: Container[str], *place: int | str) -> Problem:
        """The first hashed attempt at `place` whose prompt is not in `taken`."""
        for attempt in range(MAX_ATTEMPTS):
            problem = self._task.sample(derive_seed(self._task.name, *place, attempt))
            if problem.prompt not in taken:
                return problem
        raise ConfigError(
            "The task has too few different problems for its held-out set.",
            got=f"{self._task.name} with task.heldout_problems = {self._heldout_problems}",
            do="Lower task.heldout_problems, or give the task options that make more problems.",
        )
