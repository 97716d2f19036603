"""The plug-in interface of tasks: sample a problem from a seed, score a completion's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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
        """The reward of `completion` (decoded, no special tokens), usually in 0..1. When it raises, there is none."""
