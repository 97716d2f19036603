"""The plug-in interface of tasks: sample a problem from a seed, score a completion's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem. `prompt` is what the model is asked; `metadata` is the task's own, for its scorer."""

    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A task is stateless: the same seed gives the same problem on any machine, on any day."""

    name: str

    def sample(self, seed: int) -> Problem:
        """The problem of `seed` (0 .. 2**64 - 1)."""

    def score(self, problem: Problem, completion: str) -> float:
        """The reward of `completion` (decoded, no special tokens), in 0..1 unless the task is a `BoundedTask`.

        When it raises, or returns anything else, there is none.
        """


@runtime_checkable
class BoundedTask(Protocol):
    """A task, or an environment, that says itself between which bounds its rewards are."""

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward; all others are the scorer's failure."""


@runtime_checkable
class ExplainedTask(Task, Protocol):
    """A task that gives more than its score: components, which are shown beside it, and weigh what the run's settings,
    or the task itself (`WeighedTask`), give them."""

    def components(self, problem: Problem, completion: str) -> Mapping[str, float]:
        """Each under its name, `score` not among them. What has a weight is in 0..1, unless `component_bounds` says
        otherwise."""


@runtime_checkable
class ReadTask(Task, Protocol):
    """A task that reads answers, and says how: `echo-hub try-task` shows it."""

    def verdict(self, problem: Problem, completion: str) -> str:
        """A word or two on a completion, such as "wrong" or "not understood"."""

    def reading(self, problem: Problem) -> str:
        """How the problem's reference answer is read, such as "a number" or "not understood"."""

    def notes(self) -> tuple[str, ...]:
        """Sentences on reference answers that are not understood, with their places."""


@runtime_checkable
class MeasuredTask(Protocol):
    """A task, or an environment, that says which components it gives, and between which bounds each is."""

    @property
    def component_bounds(self) -> Mapping[str, tuple[float, float]]:
        """All of them; what is not there is in 0..1."""


@runtime_checkable
class WeighedTask(Protocol):
    """A task, or an environment, that says itself what its components weigh where the run's settings do not."""

    @property
    def component_weights(self) -> Mapping[str, float]:
        """By name; what is not there weighs nothing, the score (`score`) included."""


@runtime_checkable
class FileTask(Task, Protocol):
    """A task whose problems are those in files, and no more."""

    @property
    def num_problems(self) -> int:
        """How many problems `sample` draws from."""

    @property
    def num_heldout(self) -> int:
        """How many problems are for evaluation alone; 0 = the held-out ones are drawn like the others."""

    @property
    def content_hash(self) -> str:
        """A hash of the files: another one when a file has changed."""

    def heldout(self, number: int) -> Problem:
        """Problem `number` (0 .. num_heldout - 1) of those for evaluation alone."""


@runtime_checkable
class NumberedTask(FileTask, Protocol):
    """A `FileTask` that gives each of its problems by its number, so that all of them can be asked in turn. `sample`
    gives that of `seed % num_problems`."""

    def problem(self, number: int) -> Problem:
        """Problem `number` (0 .. num_problems - 1) of those that `sample` draws from."""
