"""Problems of a run: an endless training stream, and a held-out set. The two share no prompt.

The held-out set depends only on the task, so all runs of a task share their evaluation problems. A training problem
depends on the task, the run's seed, the problem's number, and the held-out set, which it must avoid.

Problems of an environment with state differ by their seeds: many have the same prompt, and the session hides the rest.
Their prompts may repeat. Training problems and held-out problems have different seeds.

A drawn problem is skipped if its prompt is already held out, too long, or unusable for the model (for example because
of an unpaired surrogate). The numbers of unusable problems of a `NumberedTask` are remembered, so that no long line is
read twice.

With `in_epochs`, training problems of a `NumberedTask` are drawn without replacement: each epoch is a new permutation
of all training problems. The permutation needs no memory. If a problem is skipped (because it is too long, or
equals a held-out prompt), a drawn problem replaces it and then occurs twice in that epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from echo_hub.tasks.base import FileTask, NumberedTask, Problem, Task
from echo_hub.tasks.environments.base import AnyEnvironment, Environment
from echo_shared.errors import ConfigError
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.permutation import permuted

MAX_ATTEMPTS: Final = 1_000
"""Number of failed attempts to draw one problem after which the task counts as too small."""
MAX_HELDOUT_SHARE: Final = 0.95
"""Largest share of a file's problems that may be held out. With this share, the probability that 1,000 attempts to draw
a training problem draw only held-out ones is below 1e-22."""

_TOO_LONG: Final = ConfigError("The problem is too long.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutProblems:
    """The held-out set of a stream. Other streams with equal task and settings can reuse this set."""

    prompts: tuple[str, ...]
    """The prompts of the set, in the order of its problem numbers."""
    lines: tuple[int, ...] = ()
    """Ascending numbers of the held-out problems in their `NumberedTask`. Empty for other tasks."""
    seeds: tuple[int, ...] = ()
    """Seeds of the held-out problems, in the order of their numbers. Only for environments with state."""


class PromptFitting(Protocol):
    """Decides which prompts fit into the model's context. Implemented by `echo_hub.scoring.task_problems`."""

    def fits(self, prompt: str) -> bool:
        """Return True if the model's context has space for the prompt. Raises ConfigError if the prompt is unusable."""


class ProblemStream:
    """Problems of a run. `train(n)` and `heldout(n)` always return the same problem for the same number."""

    def __init__(
        self,
        task: Task | AnyEnvironment,
        *,
        run_seed: int,
        heldout_problems: int,
        fitting: PromptFitting | None = None,
        heldout: HeldOutProblems | None = None,
        in_epochs: bool = False,
    ) -> None:
        """`fitting` checks prompts; None means that every prompt is usable. `heldout` is the held-out set that another
        stream of the same task and settings has drawn; None means that this stream draws it. If `in_epochs`, the
        problems of a `NumberedTask` are drawn without replacement.
        """
        self._task = task
        self._run_seed = run_seed
        self._heldout_problems = heldout_problems
        self._fitting = fitting
        self._known = heldout
        self.others: Sequence[ProblemStream] = ()
        """Streams of the run's other tasks. This stream does not train on their held-out problems."""
        # Store the result: isinstance() with a protocol is slow.
        self._numbered = task if isinstance(task, NumberedTask) else None
        self._has_state = isinstance(task, Environment)
        self._in_epochs = in_epochs and self._numbered is not None
        self._passed_over: dict[int, ConfigError] = {}
        """Problems of a `NumberedTask` that were skipped as unusable: the reason for each problem number."""

    def train(self, number: int) -> Problem:
        """Return problem `number` (0, 1, ...) of the training stream. Prompts may repeat, but are never held out.

        Raises ConfigError if all prompts of the task are held out.
        """
        if self._in_epochs:
            size = self.num_lines
            epoch, place = divmod(number, size)
            problem = self.line(permuted(place, size, "epoch", self._task.name, self._run_seed, epoch))
            if self._suits(problem):
                return problem
        taken = () if self._has_state else self._heldout
        return self._first_outside(taken, "train", self._run_seed, number)[0]

    @property
    def num_lines(self) -> int:
        """Number of a `NumberedTask`'s problems that are not held out. Raises ConfigError if it is 0."""
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
        """Return the problem at `place` (0 .. num_lines - 1) among the `NumberedTask`'s problems that are not
        held out.
        """
        assert self._numbered is not None
        return self._numbered.problem(place + bisect_right(self._held_before, place))

    @cached_property
    def _held_before(self) -> list[int]:
        """Return, for each held-out problem in file order, the number of training problems before it."""
        return [line - number for number, line in enumerate(self.held_out.lines)]

    def _suits(self, problem: Problem) -> bool:
        return problem.prompt not in self._heldout and self._failure(problem) is None

    def heldout(self, number: int) -> Problem:
        """Return problem `number` (0 .. heldout_problems - 1) of the held-out set. Drawn problems have distinct
        prompts.

        Raises ConfigError if the task is too small for the set.
        """
        if isinstance(self._task, FileTask) and self._task.num_heldout:
            return self._task.heldout(number)
        if self._has_state:
            return self._task.sample(self.held_out.seeds[number])
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
        """Draw the held-out set now. Raises ConfigError if the task is too small or its problems are too long."""
        self.train(0)

    @property
    def heldout_prompts(self) -> tuple[str, ...]:
        return self.held_out.prompts

    @cached_property
    def held_out(self) -> HeldOutProblems:
        """The held-out set. It is drawn when it is first used."""
        if self._known is not None:
            return self._known
        if isinstance(self._task, FileTask):
            self._check_size(self._task)
            if self._task.num_heldout:
                numbers = range(self._heldout_problems)
                return HeldOutProblems(prompts=tuple(self._checked(self._task.heldout(n).prompt) for n in numbers))
        if self._has_state:
            drawn = [self._first_outside((), "heldout", number) for number in range(self._heldout_problems)]
            return HeldOutProblems(
                prompts=tuple(problem.prompt for problem, _ in drawn), seeds=tuple(seed for _, seed in drawn)
            )
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
        return frozenset(self.held_out.prompts).union(*(other.held_out.prompts for other in self.others))

    def _fits(self, prompt: str) -> bool:
        return self._fitting is None or self._fitting.fits(prompt)

    def _checked(self, prompt: str) -> str:
        if self._fits(prompt):
            return prompt
        raise ConfigError(
            "A held-out problem is too long: the base model's context has no room for it and a completion.",
            got=f"a prompt of {len(prompt)} characters: {prompt[:80]!r}",
            do="Remove it from the file, or lower sampling.max_tokens.",
        )

    def _check_size(self, task: FileTask) -> None:
        """Raise ConfigError if the file is too small for the held-out set."""
        limit = task.num_heldout or int(MAX_HELDOUT_SHARE * task.num_problems)
        if self._heldout_problems > limit:
            held = f"{task.num_heldout} held-out problems" if task.num_heldout else f"{task.num_problems} problems"
            raise ConfigError(
                "The task has too few problems for its held-out set.",
                got=f"{task.name} with {held}, evaluation.problems = {self._heldout_problems}",
                do=f"Set evaluation.problems to at most {limit}, or give the task more problems.",
            )

    def _first_outside(self, taken: Container[str], *place: int | str) -> tuple[Problem, int]:
        """Return the first usable problem whose prompt is not in `taken`, and its seed. `place` (stream and position)
        determines the order of the drawn problems."""
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
        """Return the reason why a problem must be skipped. Return None if the problem can be used."""
        try:
            return None if problem.prompt_ids or self._fits(problem.prompt) else _TOO_LONG
        except ConfigError as error:
            # Make a new error: the original one refers to its cause, which holds the prompt.
            return ConfigError(error.what, got=error.got, do=error.do)

    def _check_attempts(self, failures: Sequence[ConfigError]) -> None:
        """Raise ConfigError, with the reason, if all attempts gave unusable or too long problems."""
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
