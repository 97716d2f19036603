"""Plug-in interface of environments: tasks that answer the model's turns until the episode ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from echo_hub.tasks.base import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to the model after its turn: from the user, or the answer of a tool that the model called."""

    text: str
    role: Literal["user", "tool"] = "user"
    """Sender of the message. A chat template renders a tool's message in its own format; without a chat template, roles
    are invisible."""
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
    """The environment's response if the episode continues: `text` is the next message, of a user (then not empty) or of
    a tool.
    """

    more: tuple[Message, ...] = ()
    """Further messages before the model's next turn: answers of other tools called in the same turn."""
    reward_if_cut: float = 0.0
    """Reward of the episode if the base model's context has no room for another turn. The episode then has no
    components; those with a weight count as their lowest value.
    """
    turn_reward: float = 0.0
    """Part of the episode's reward that the model's last turn earned; may be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The episode is over. `reward` is that of the whole episode, in 0..1 unless the environment is an
    `echo_hub.tasks.base.BoundedTask`. The last turn earns `reward` minus all earlier `turn_reward`s."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Components by name, as those of an `echo_hub.tasks.base.ExplainedTask`."""


Response = Observation | Ending


@runtime_checkable
class ToolTask(Protocol):
    """A task or an environment that gives the model tools."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tool definitions in the form that chat templates take, part of every prompt: {"type": "function", "function":
        {"name": ..., "description": ..., "parameters": JSON schema}}."""


@runtime_checkable
class Environment(Protocol):
    """A stateless environment: each call gets all turns so far, and replays them.

    Seeds determine problems, and turns determine responses, on any machine at any time. Every episode must end after a
    bounded number of turns.
    """

    name: str

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed` (0 .. 2**64 - 1); its prompt opens the conversation."""

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """Return the response to the last of `replies`, which are all turns of the model (decoded, no special tokens).

        After an exception, the last turn has no reward and is sampled again, as after a failed scorer.
        """
