"""The plug-in interface of environments: tasks that answer the model's turns, until one of them ends the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from echo_hub.tasks.base import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The episode goes on: `text` is the next user turn, never empty."""

    text: str
    reward_if_cut: float = 0.0
    """The episode's reward if the conversation has no room for another turn in the base model's context. Then it has no
    components, and those with a weight count as their lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The episode is over. `reward` is in 0..1 unless the environment is an `echo_hub.tasks.base.BoundedTask`."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """More than the reward, each under its name: as those of an `echo_hub.tasks.base.ExplainedTask`."""


Response = Observation | Ending


@runtime_checkable
class Environment(Protocol):
    """A stateless environment: it holds no episodes, but is given all turns so far and plays them again.

    The same seed gives the same problem, and the same turns the same response, on any machine, on any day. It must end
    every episode after a bounded number of turns.
    """

    name: str

    def sample(self, seed: int) -> Problem:
        """The problem of `seed` (0 .. 2**64 - 1); its prompt opens the conversation."""

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """The response to the last of `replies`: all turns of the model so far (decoded, no special tokens).

        When it raises, the last turn has no reward and is drawn again, like a completion that cannot be scored.
        """
