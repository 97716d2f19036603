"""The problems of a run: an endless training stream, and a held-out set that shares no prompt with it.

The held-out set depends on the task alone, so that every run of a task, whatever its seed, is judged by the same
problems. A training problem depends on the task, the run's seed, its number, and on the held-out set that it avoids.

A drawn problem that the model has no room for is passed over, like one that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import Final

from echo_hub.tasks.base import FileTask, Problem, Task
from echo_hub.tasks.environments.base import Environment
from echo_shared.draws import derive_seed
from echo_shared.errors import ConfigError

MAX_ATTEMPTS: Final = 1_000
"""Hashed attempts at one problem before the task counts as too small."""
MAX_HELDOUT_SHARE: Final = 0.95
"""The largest share of a file's problems: with the rest, 1,000 attempts in vain have a probability below 1e-22."""


class ProblemStream:
    """A run's problems. `train(n)` and `heldout(n)` are the same problem for the same number, in any order, on any
    day."""

    def __init__(
        self,
        task: Task | Environment,
        *,
        run_seed: int,
        heldout_problems: int,
        fits: Callable[[str], bool] = lambda prompt: True,
        heldout_prompts: Sequence[str] | None = None,
    ) -> None:
        """`fits`: whether the model has room for a prompt. `heldout_prompts`: those of an equal stream, which spares
        this one to draw them; None = they are drawn."""
        self._task = task
        self._run_seed = run_seed
        self._heldout_problems = heldout_problems
        self._fits = fits
        self._known_prompts = heldout_prompts

    def train(self, number: int) -> Problem:
        """Problem `number` (0, 1, ...) of the training stream; prompts may repeat, held-out ones never appear.

        Raises ConfigError when the task has no prompt left beside the held-out ones.
        """
        return self._first_outside(self._heldout, "train", self._run_seed, number)

    def heldout(self, number: int) -> Problem:
        """Problem `number` (0 .. heldout_problems - 1) of the held-out set; drawn ones all have different prompts.

        Raises ConfigError when the task is too small for the set.
        """
        if isinstance(self._task, FileTask) and self._task.num_heldout:
            return self._task.heldout(number)
        prompt = self.heldout_prompts[number]
        for attempt in range(MAX_ATTEMPTS):
            problem = self._attempt(attempt, "heldout", number)
            if problem.prompt == prompt:
                return problem
        raise ConfigError(
            "The task does not give the same problem for the same seed.",
            got=f"{self._task.name}, held-out problem {number}",
            do="Make its sample method a function of the seed alone.",
        )

    def prepare(self) -> None:
        """Draws the held-out set now, not when it is first needed. Raises ConfigError when the task is too small, or
        its problems too long."""
        self.train(0)

    @cached_property
    def heldout_prompts(self) -> tuple[str, ...]:
        """The prompts of the held-out problems, in their order."""
        if self._known_prompts is not None:
            return tuple(self._known_prompts)
        if isinstance(self._task, FileTask):
            self._check_size(self._task)
            if self._task.num_heldout:
                return tuple(self._checked(self._task.heldout(n).prompt) for n in range(self._heldout_problems))
        prompts: dict[str, None] = {}
        for number in range(self._heldout_problems):
            prompts[self._first_outside(prompts, "heldout", number).prompt] = None
        return tuple(prompts)

    @cached_property
    def _heldout(self) -> frozenset[str]:
        return frozenset(self.heldout_prompts)

    def _checked(self, prompt: str) -> str:
        if self._fits(prompt):
            return prompt
        raise ConfigError(
            "A held-out problem is too long: the base model's context has no room for it and a completion.",
            got=f"a prompt of {len(prompt)} characters: {prompt[:80]!r}",
            do="Remove it from the file, or lower sampling.max_tokens.",
        )

    def _check_size(self, task: FileTask) -> None:
        """Raises ConfigError unless all that will be asked for is there, or found in far fewer than MAX_ATTEMPTS."""
        limit = task.num_heldout or int(MAX_HELDOUT_SHARE * task.num_problems)
        if self._heldout_problems > limit:
            held = f"{task.num_heldout} held-out problems" if task.num_heldout else f"{task.num_problems} problems"
            raise ConfigError(
                "The task has too few problems for its held-out set.",
                got=f"{task.name} with {held}, evaluation.problems = {self._heldout_problems}",
                do=f"Set evaluation.problems to at most {limit}, or give the task more problems.",
            )

    def _first_outside(self, taken: Container[str], *place: int | str) -> Problem:
        """The first hashed attempt at `place` whose prompt fits and is not in `taken`."""
        too_long = 0
        for attempt in range(MAX_ATTEMPTS):
            problem = self._attempt(attempt, *place)
            if problem.prompt not in taken:
                if self._fits(problem.prompt):
                    return problem
                too_long += 1
        if too_long:
            raise ConfigError(
                "The task's problems are too long: the base model's context has no room for them and a completion.",
                got=f"{self._task.name}: {too_long} of {MAX_ATTEMPTS} problems were too long, the others held out",
                do="Lower sampling.max_tokens, or give the task options, or files, that make shorter problems.",
            )
        raise ConfigError(
            "The task has too few different problems for its held-out set.",
            got=f"{self._task.name} with evaluation.problems = {self._heldout_problems}",
            do="Lower evaluation.problems, or give the task options, or files, that make more problems.",
        )

    def _attempt(self, attempt: int, *place: int | str) -> Problem:
        return self._task.sample(derive_seed(self._task.name, *place, attempt))
