"""Plug-in interfaces of environments. An environment is a task that answers the model's turns until the episode ends.

A `ReplayedEnvironment` has no state: it gets all turns so far, and runs in scoring processes. An `Environment` has
state: each episode has a `Session`, which the hub's session host keeps from turn to turn (`echo_hub.sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from echo_hub.tasks.base import Problem
from echo_shared.errors import EchoError


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
    message must not be empty, unless `ids` are given."""

    ids: tuple[int, ...] = ()
    """Token ids between this turn and the next, used unchanged; only for sessions. If they are (), the hub tokenises
    the messages."""

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
    `echo_hub.tasks.base.BoundedTask`. The last turn earns `reward` minus the `turn_reward`s of all earlier turns."""

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
class ReplayedEnvironment(Protocol):
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

        An exception drops the last turn without a reward, like a scorer's failure. Nodes sample the turn again.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's turn, as a session gets it."""

    text: str
    """The turn's text, without special tokens."""
    ids: tuple[int, ...] = ()
    """The turn's token ids, with the stop token."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each id under the policy that drew it, in nats; () if it is unknown, as in a trial."""
    finish_reason: Literal["stop", "length"] = "stop"
    """`stop` if the model ended the turn with a stop token, `length` if the turn was cut at the largest number of
    tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a session's episode. It must equal the prompt of the session's problem, otherwise the hub counts
    the session as lost."""

    text: str = ""
    ids: tuple[int, ...] = ()
    """Token ids of the prompt, used unchanged. If they are (), the hub tokenises `text`."""


class Session(Protocol):
    """One episode of an `Environment`. Calls come one at a time, in order.

    A call may raise `SessionGone`, `EnvironmentAway`, or any other exception, which counts as SessionGone. After an
    exception or a timeout, only `close` is called.
    """

    async def reset(self) -> Opening:
        """Begin the episode. Called once, before any other call."""

    async def step(self, reply: Reply) -> Response:
        """Give the model's turn to the environment."""

    async def score(self) -> Ending:
        """End the episode now, because the context is full or all turns are used."""

    async def close(self) -> None:
        """Free the session's resources, even during a cancelled call. Must not wait long."""


@runtime_checkable
class Environment(Protocol):
    """An environment with state. Each episode has a session, which lives from turn to turn.

    Optional attributes, with their defaults: `replay: bool = True` (a new session that gets the same turns answers the
    same, so a dead session can be rebuilt); `verify_first: bool = False` (steps cost money or have outside effects:
    take a step only after the hub has verified that the node drew the turn honestly); `max_turns: int = 0` (the session
    is scored after this many turns; 0 = no limit); `isolated: bool = False` (its sessions cannot harm the hub, wherever
    they run); `reward_if_lost: float` (reward of an episode that was lost too often; default: the lowest bound).
    """

    name: str

    def sample(self, seed: int) -> Problem:
        """Return the problem of `seed` (0 .. 2**64 - 1). Blocks, and may take long. A seed always gives the same
        problem. Problems of different seeds may have the same prompt, because the session may hold the parts that
        differ."""

    async def open(self, problem: Problem, seed: int) -> Session:
        """Open a session of a problem. All sessions of a group (the episodes of one prompt) get the same `seed`, even
        after an episode's restart.

        Raises EnvironmentAway or NoSlot if no session can be opened now; the hub then tries again later.
        """


AnyEnvironment = ReplayedEnvironment | Environment


class SessionGone(EchoError):
    """A session's state is lost. The hub opens a new session, and rebuilds the state there from the stored turns."""

    default_code = "session_gone"


class ProcessDied(SessionGone):
    """The process that forks an environment's sessions has died with all of them. The process runs no environment code,
    so such a death never counts as a lost session."""


class EnvironmentAway(EchoError):
    """The environment, or its server, does not answer. The hub waits until it answers, and tells the operator. The wait
    never counts as a lost session."""

    default_code = "environment_away"


class EpisodeRefused(EchoError):
    """The environment cannot continue this episode, not even in a new session. The episode ends, with the reward
    `reward_if_lost`."""

    default_code = "episode_refused"


class NoSlot(EchoError):
    """The environment has no slot for one more session. The hub waits for a slot. The wait never counts as a lost
    session."""

    default_code = "no_slot"

    def __init__(self, what: str, *, most: int | None = None, got: str | None = None, do: str | None = None) -> None:
        """`most` is the number of sessions that the environment takes at once; None means that it is unknown."""
        super().__init__(what, got=got, do=do)
        self.most = most
