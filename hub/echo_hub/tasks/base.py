"""Plug-in interface of tasks: sample a problem from a seed, and score the text of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem. `prompt` is the model's input. Only the task and its scorer read `metadata`."""

    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = ()
    """Token ids of the prompt, used unchanged; only for environments with state. () = the hub tokenises `prompt`."""


class Task(Protocol):
    """A task without state. A seed always determines the same problem, on any machine."""

    name: str

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed` (0 .. 2**64 - 1)."""

    def score(self, problem: Problem, completion: str) -> float:
        """Return the reward of `completion` (decoded, without special tokens). It is in 0..1 unless the task is a
        `BoundedTask`.

        If this method raises an exception or returns an invalid value, the completion has no reward.
        """


@runtime_checkable
class BoundedTask(Protocol):
    """A task, or an environment, that declares the bounds of its rewards."""

    @property
    def reward_bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest reward. A reward outside these bounds counts as a failure of the scorer."""


@runtime_checkable
class ExplainedTask(Task, Protocol):
    """A task that returns components in addition to its score.

    Components are shown next to the score. The run's settings or the task (`WeighedTask`) may give them weights.
    """

    def components(self, problem: Problem, completion: str) -> Mapping[str, float]:
        """Return the components by name, without `score`. Components with a weight must be in 0..1, unless
        `component_bounds` declares other bounds."""


@runtime_checkable
class ReadTask(Task, Protocol):
    """A task that can tell how it reads answers, for `echo-hub try-task`."""

    def verdict(self, problem: Problem, completion: str) -> str:
        """Return a short verdict on a completion, such as "wrong" or "not understood"."""

    def reading(self, problem: Problem) -> str:
        """Return how the problem's reference answer is read, such as "a number" or "not understood"."""

    def notes(self) -> tuple[str, ...]:
        """Return sentences about reference answers that cannot be parsed, and where they are."""


@runtime_checkable
class MeasuredTask(Protocol):
    """A task, or an environment, that declares the bounds of its components."""

    @property
    def component_bounds(self) -> Mapping[str, tuple[float, float]]:
        """Return the bounds of components by name. A component that is not listed has the bounds 0 and 1."""


@runtime_checkable
class WeighedTask(Protocol):
    """A task, or an environment, that gives its reward components default weights. The run's settings override these
    weights."""

    @property
    def component_weights(self) -> Mapping[str, float]:
        """Return the weights of components by name; `score` is the task's own score. A component that is not listed has
        weight 0, even `score`."""


@runtime_checkable
class FileTask(Task, Protocol):
    """A task with a fixed set of problems, which it reads from files."""

    @property
    def num_problems(self) -> int:
        """Number of problems from which `sample` draws."""

    @property
    def num_heldout(self) -> int:
        """Number of problems reserved for evaluation. 0 means that no problems are reserved: the hub then takes
        held-out problems from the training problems."""

    @property
    def content_hash(self) -> str:
        """Hash of the contents of the task's files."""

    def heldout(self, number: int) -> Problem:
        """Return problem `number` (0 .. num_heldout - 1) of the problems reserved for evaluation."""


@runtime_checkable
class NumberedTask(FileTask, Protocol):
    """A `FileTask` whose problems can be read by number, so that a run can use every problem.

    `sample(seed)` returns problem `seed % num_problems`.
    """

    def problem(self, number: int) -> Problem:
        """Return problem `number` (0 .. num_problems - 1) of the problems from which `sample` draws."""
