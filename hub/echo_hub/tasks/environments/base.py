"""Plug-in interface of environments. An environment is a task that answers the model's turns until the episode ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from echo_hub.tasks.base import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to the model after its turn. The sender is the user, or a tool that the model called."""

    text: str
    role: Literal["user", "tool"] = "user"
    """Sender of the message. A chat template renders a tool's message in its own format. Without a chat template, the
    model does not see the role."""
    name: str = ""
    """Name of the tool, for templates that show it."""
    tool_call_id: str = ""
    """Id of the answered call, for templates that show it."""

    @property
    def fields(self) -> dict[str, str]:
        """Return the message in the form that chat templates take."""
        fields = {"role": self.role, "content": self.text, "name": self.name, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in fields.items() if value or name in ("role", "content")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(Message):
    """The environment's response if the episode continues. `text` is the next message, from a user or a tool. A user's
    message must not be empty."""

    more: tuple[Message, ...] = ()
    """More messages before the model's next turn: answers of other tools that the same turn called."""
    reward_if_cut: float = 0.0
    """Reward of the episode if the base model's context has no space for another turn. Then the episode has no
    components, and each component with a weight counts as its lowest value."""
    turn_reward: float = 0.0
    """Part of the episode's reward that the model's last turn earned. It may be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the episode. `reward` belongs to the whole episode, and is in 0..1 unless the environment is an
    `echo_hub.tasks.base.BoundedTask`. The last turn earns `reward` minus all earlier `turn_reward`s."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Components by name, like those of an `echo_hub.tasks.base.ExplainedTask`."""


Response = Observation | Ending


@runtime_checkable
class ToolTask(Protocol):
    """A task, or an environment, that gives the model tools."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Definitions of the tools in the form that chat templates take. They are part of every prompt: {"type":
        "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}."""


@runtime_checkable
class Environment(Protocol):
    """An environment without state. Each call gets all turns so far, and replays them.

    Seeds always determine the same problems, and turns the same responses, on any machine. Every episode must end after
    a limited number of turns.
    """

    name: str

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed` (0 .. 2**64 - 1). Its prompt opens the conversation."""

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """Return the response to the last of `replies`, which are all turns of the model (decoded, without special
        tokens).

        After an exception, the last turn has no reward and is sampled again, as after a scorer's failure.
        """
