"""The plug-in interface of environments: tasks that answer the model's turns, until one of them ends the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from echo_hub.tasks.base import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of whoever answers the model: a user, or a tool that it has called."""

    text: str
    role: Literal["user", "tool"] = "user"
    """A tool's turn stands in the chat template's own form for it; without a chat template, roles are not seen."""
    name: str = ""
    """Of the tool, for templates that show it."""
    tool_call_id: str = ""
    """For templates that show which call is answered."""

    @property
    def fields(self) -> dict[str, str]:
        """As chat templates have it."""
        fields = {"role": self.role, "content": self.text, "name": self.name, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in fields.items() if value or name in ("role", "content")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(Message):
    """The episode goes on: `text` is the next turn, a user's, never empty, or a tool's."""

    more: tuple[Message, ...] = ()
    """Further turns behind it, before the model's next: what other tools have said that it called at once."""
    reward_if_cut: float = 0.0
    """The episode's reward if the conversation has no room for another turn in the base model's context. Then it has no
    components, and those with a weight count as their lowest."""
    turn_reward: float = 0.0
    """What of the episode's reward the turn that is answered has earned; may be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The episode is over. `reward` is the whole episode's, in 0..1 unless the environment is an
    `echo_hub.tasks.base.BoundedTask`: the last turn has earned what the `turn_reward`s of those before leave of it."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """More than the reward, each under its name: as those of an `echo_hub.tasks.base.ExplainedTask`."""


Response = Observation | Ending


@runtime_checkable
class ToolTask(Protocol):
    """A task, or an environment, that gives the model tools."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Their definitions in the form that chat templates take: {"type": "function", "function": {"name": ...,
        "description": ..., "parameters": JSON schema}}. They are part of every prompt."""


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
