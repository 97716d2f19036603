"""The problems of a run: an endless training stream, and a held-out set that shares no prompt with it.

The held-out set depends on the task alone, so that every run of a task, whatever its seed, is judged by the same
problems. A training problem depends on the task, the run's seed, its number, and on the held-out set that it avoids.

A drawn problem that the model has no room for, or that cannot be given to it (it holds half of a character, say), is
passed over, like one that is taken. Of a `NumberedTask` its number is remembered: a line of megabytes is read once.

With `epochs`, a `NumberedTask`'s problems of training come without replacement: those that are not held out stand in a
row, and problem n of the stream is at place n of it, which is permuted anew each time that it is through. It takes no
memory, and the same number gives the same problem. In the place of one that is passed over after all (it is too long,
or another line has a held-out prompt) comes a drawn one, which that epoch then has twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from echo_hub.tasks.base import FileTask, NumberedTask, Problem, Task
from echo_hub.tasks.environments.base import Environment
from echo_shared.draws import derive_seed
from echo_shared.errors import ConfigError

MAX_ATTEMPTS: Final = 1_000
"""Hashed attempts at one problem before the task counts as too small."""
MAX_HELDOUT_SHARE: Final = 0.95
"""The largest share of a file's problems: with the rest, 1,000 attempts in vain have a probability below 1e-22."""

_TOO_LONG: Final = ConfigError("The problem is too long.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutProblems:
    """What a stream has drawn as its held-out set: an equal stream need not draw it again."""

    prompts: tuple[str, ...]
    """In their order."""
    lines: tuple[int, ...] = ()
    """The numbers of those that were drawn from the problems of a `NumberedTask`, ascending."""


Order = Callable[..., int]
"""`echo_hub.core.permutation.permuted`: what stands at a place of so many, by a key."""


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
        heldout: HeldOutProblems | None = None,
        epochs: Order | None = None,
        avoid: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`fits`: whether the model has room for a prompt; raises ConfigError where it cannot be given to the model.
        `heldout`: that of an equal stream; None = it is drawn.
        `epochs`: the order of a `NumberedTask`'s problems; None = they are drawn with replacement.
        `avoid`: prompts that are not trained on either, asked for once: what the run's other tasks hold out."""
        self._task = task
        self._run_seed = run_seed
        self._heldout_problems = heldout_problems
        self._fits = fits
        self._known = heldout
        self._avoid = avoid
        self._numbered = task if isinstance(task, NumberedTask) else None  # Asked once: the answer takes long.
        self._epochs = epochs if self._numbered is not None else None
        self._passed_over: dict[int, ConfigError] = {}
        """Of a `NumberedTask`: the problems that do not fit, and why."""

    def train(self, number: int) -> Problem:
        """Problem `number` (0, 1, ...) of the training stream; prompts may repeat, held-out ones never appear.

        Raises ConfigError when the task has no prompt left beside the held-out ones.
        """
        if self._epochs is not None:
            size = self.num_lines
            epoch, place = divmod(number, size)
            problem = self.line(self._epochs(place, size, "epoch", self._task.name, self._run_seed, epoch))
            if self._suits(problem):
                return problem
        return self._first_outside(self._heldout, "train", self._run_seed, number)[0]

    @property
    def num_lines(self) -> int:
        """Of a `NumberedTask`: how many of its problems are not held out. Raises ConfigError when none is left."""
        assert self._numbered is not None
        size = self._numbered.num_problems - len(self.held_out.lines)
        if size < 1:
            raise ConfigError(
                "All problems of the task are held out.",
                got=f"{self._task.name} with {self._numbered.num_problems} problems",
                do="Lower evaluation.problems, or give the task more problems.",
            )
        return size

    def line(self, place: int) -> Problem:
        """Of a `NumberedTask`: the problem at `place` (0 .. num_lines - 1) of those that are not held out."""
        assert self._numbered is not None
        return self._numbered.problem(place + bisect_right(self._held_before, place))

    @cached_property
    def _held_before(self) -> list[int]:
        """Of each held-out line, how many lines before it are not held out."""
        return [line - number for number, line in enumerate(self.held_out.lines)]

    def _suits(self, problem: Problem) -> bool:
        """Whether it may be trained on."""
        return problem.prompt not in self._heldout and self._failure(problem) is None

    def heldout(self, number: int) -> Problem:
        """Problem `number` (0 .. heldout_problems - 1) of the held-out set; drawn ones all have different prompts.

        Raises ConfigError when the task is too small for the set.
        """
        if isinstance(self._task, FileTask) and self._task.num_heldout:
            return self._task.heldout(number)
        prompt = self.heldout_prompts[number]
        for attempt in range(MAX_ATTEMPTS):
            problem = self._task.sample(self._seed(attempt, "heldout", number))
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

    @property
    def heldout_prompts(self) -> tuple[str, ...]:
        """The prompts of the held-out problems, in their order."""
        return self.held_out.prompts

    @cached_property
    def held_out(self) -> HeldOutProblems:
        """The held-out set."""
        if self._known is not None:
            return self._known
        if isinstance(self._task, FileTask):
            self._check_size(self._task)
            if self._task.num_heldout:
                numbers = range(self._heldout_problems)
                return HeldOutProblems(prompts=tuple(self._checked(self._task.heldout(n).prompt) for n in numbers))
        prompts: dict[str, int] = {}
        for number in range(self._heldout_problems):
            problem, seed = self._first_outside(prompts, "heldout", number)
            prompts[problem.prompt] = seed
        if self._numbered is None:
            return HeldOutProblems(prompts=tuple(prompts))
        lines = sorted(seed % self._numbered.num_problems for seed in prompts.values())
        return HeldOutProblems(prompts=tuple(prompts), lines=tuple(lines))

    @cached_property
    def _heldout(self) -> frozenset[str]:
        return frozenset(self.held_out.prompts).union(self._avoid())

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

    def _first_outside(self, taken: Container[str], *place: int | str) -> tuple[Problem, int]:
        """The first hashed attempt at `place` whose prompt fits and is not in `taken`, and its seed."""
        failures: list[ConfigError] = []
        for attempt in range(MAX_ATTEMPTS):
            seed = self._seed(attempt, *place)
            number = None if self._numbered is None else seed % self._numbered.num_problems
            if number is not None and number in self._passed_over:
                failures.append(self._passed_over[number])
                continue
            problem = self._task.sample(seed)
            if problem.prompt in taken:
                continue
            failure = self._failure(problem)
            if failure is None:
                return problem, seed
            failures.append(failure)
            if number is not None:
                self._passed_over[number] = failure
        self._check_attempts(failures)
        raise ConfigError(
            "The task has too few different problems for its held-out set.",
            got=f"{self._task.name} with evaluation.problems = {self._heldout_problems}",
            do="Lower evaluation.problems, or give the task options, or files, that make more problems.",
        )

    def _failure(self, problem: Problem) -> ConfigError | None:
        """Return why a problem is passed over, or None if it fits."""
        try:
            return None if self._fits(problem.prompt) else _TOO_LONG
        except ConfigError as error:
            return ConfigError(error.what, got=error.got, do=error.do)  # Without what led to it: that holds the prompt.

    def _check_attempts(self, failures: Sequence[ConfigError]) -> None:
        """Raises ConfigError where problems were passed over, and no other was found."""
        if wrong := [failure for failure in failures if failure is not _TOO_LONG]:
            raise ConfigError(
                "The task's problems cannot be given to the model.",
                got=f"{self._task.name}: {len(wrong)} of {MAX_ATTEMPTS} problems, the last one: {wrong[-1].brief}",
                do=wrong[-1].do or "Give the task options, or files, that make other problems.",
            )
        if failures:
            raise ConfigError(
                "The task's problems are too long: the base model's context has no room for them and a completion.",
                got=f"{self._task.name}: {len(failures)} of {MAX_ATTEMPTS} problems were too long, the others held out",
                do="Lower sampling.max_tokens, or give the task options, or files, that make shorter problems.",
            )

    def _seed(self, attempt: int, *place: int | str) -> int:
        return derive_seed(self._task.name, *place, attempt)
