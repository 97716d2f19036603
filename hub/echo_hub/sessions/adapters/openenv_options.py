"""Names and options of OpenEnv tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from echo_hub.sessions.adapters.openenv_wire import VALIDATION_ERROR
from echo_hub.tasks.options import TaskOptions
from echo_hub.tasks.rewards import MAX_REWARD
from echo_shared.errors import ConfigError
from echo_shared.settings import MASK

PLACEHOLDER: Final = "{observation}"
UNCLIPPED: Final = "unclipped"
"""Name of the reward component that holds the sum of all steps' rewards before it is clipped to the reward's bounds."""
_URL: Final = re.compile(r"(wss?)://([^/?#\s@]+)(/[^?#\s]*)?")
_MODULE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Where the environment's server is: at an address, or in a module that the hub starts."""

    url: str = ""
    """Address of the server's WebSocket; "" if the hub starts the server from `module`."""
    module: str = ""
    """MODULE:APP, from which the hub starts the server with uvicorn; "" if the server runs at `url`."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Parse the text after `openenv:` in a task's name. Raises ConfigError if it is neither an address nor
        MODULE:APP."""
        if _URL.fullmatch(name):
            return cls(url=name)
        if _MODULE.fullmatch(name):
            return cls(module=name)
        raise ConfigError(
            "The task's name does not say where the OpenEnv server is.",
            got=f"task.name = 'openenv:{name}'",
            do="Write openenv:ws://HOST:PORT/ws for a server that runs, or openenv:MODULE:APP for one to start.",
        )

    @property
    def reset_url(self) -> str:
        """Address of `POST /reset` at the same server."""
        return re.sub(r"^ws", "http", self.url).removesuffix("/").removesuffix("/ws") + "/reset"


class OpenEnvOptions(TaskOptions):
    """How a run plays an OpenEnv environment."""

    prompt: Annotated[str, Field(min_length=1)] = PLACEHOLDER
    """Text of the first prompt. `{observation}` stands for the observation of the reset. Without this placeholder, the
    prompt is the text alone."""
    observation: str = ""
    """Field of an observation whose value is the model's next message, as in `echoed_message` or `result.text`.
    Default: the whole observation as JSON."""
    action: str = ""
    """Field of an action that receives the model's answer as text. Only with form = "field"."""
    form: Literal["field", "json", "tools"] | None = None
    """How a reply becomes an action. field: the answer is the value of `action`. json: the answer is the action, a JSON
    object. tools: each tool call in the reply is a `call_tool` action. Default: field if `action` is set, else json."""
    constants: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every action, as in {type = "move"}."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Definitions of the tools, for form = "tools": {name, description, parameters}."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of every reset, in addition to the seed."""
    seed: bool = True
    """True = give each reset a seed. All episodes of a group get the same seed."""
    turns: Annotated[int, Field(ge=1, le=1024)] = 16
    """Largest number of turns of the model in an episode."""
    reward_bounds: tuple[_Reward, _Reward] = (0.0, 1.0)
    """Lowest and highest reward of an episode. The sum of all step rewards is clipped to this range."""
    mistakes: tuple[str, ...] = (VALIDATION_ERROR,)
    """Codes of the server's errors that count as the model's mistake. All other codes count as faults of the server."""
    on_mistake: Literal["observe", "end"] = "observe"
    """What follows a mistake of the model. observe: the model reads the error and has another turn. end: the episode
    ends."""
    mistake_reward: _Reward = 0.0
    """Reward of a turn with a mistake."""
    replay: bool = True
    """False if actions have effects outside the environment. Then an episode whose session was lost starts again; with
    True, the hub replays the episode's stored turns in a new session."""
    verify_first: bool = False
    """Send an action only after the hub has verified that the node drew it honestly. Meant for actions that cost
    money."""
    reward_if_lost: _Reward | None = None
    """Reward of an episode whose session was lost too often; default: the lowest of reward_bounds."""
    authorization_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,99})?$")] = ""
    """Name of the hub's environment variable that holds the header Authorization for a private server, such as "Bearer
    KEY"."""
    directory: str = ""
    """Directory in which the hub starts the server's module; default: the hub's working directory."""
    connect_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time to open a session, in seconds."""
    answer_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time of a reset or a step, in seconds. The setting sessions.step_timeout_s also limits the time of all
    steps of one turn together."""
    largest_kb: Annotated[int, Field(ge=1, le=262_144)] = 4096
    """Largest answer of the server, in KB."""

    @classmethod
    def read(cls, task: str, options: Mapping[str, Any]) -> Self:
        """Validate the options of the task openenv:PLACE. A module's directory becomes absolute. Raises ConfigError."""
        place = ServerPlace.of(task.partition(":")[2])
        read = super().read(task, options)
        if place.module and read.authorization_env:
            raise ConfigError(
                "task.options.authorization_env is for a server at an address.",
                got=task,
                do="Leave authorization_env out: only this hub reaches a server that it starts.",
            )
        if place.module:
            return read.model_copy(update={"directory": str(Path(read.directory).expanduser().absolute())})
        if read.directory:
            raise ConfigError(
                "task.options.directory is for a server that the hub starts.",
                got=task,
                do="Leave directory out, or name a module: openenv:MODULE:APP.",
            )
        return read

    @property
    def declared(self) -> Mapping[str, Any]:
        """Return the attributes of the environment that the hub must know before it opens a session."""
        lost = self.reward_bounds[0] if self.reward_if_lost is None else self.reward_if_lost
        return {
            "reward_bounds": self.reward_bounds,
            "component_bounds": {UNCLIPPED: (-MAX_REWARD, MAX_REWARD)},
            # Chat templates take definitions in this form.
            "tools": [one if "function" in one else {"type": "function", "function": one} for one in self.tools],
            "max_turns": self.turns,
            "replay": self.replay,
            "verify_first": self.verify_first,
            "reward_if_lost": lost,
        }

    @property
    def variables(self) -> Sequence[str]:
        """Return the names of the hub's environment variables that the adapter's process gets."""
        return [self.authorization_env] if self.authorization_env else []

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for each request to the server. Raises ConfigError if the variable that holds the key is not set."""
        if not self.authorization_env:
            return {}
        value = os.environ.get(self.authorization_env, "").strip()
        if not value or not value.isprintable() or not value.isascii():
            raise ConfigError(
                "The OpenEnv server's key is not in the environment.",
                got=f"task.options.authorization_env = {self.authorization_env!r}, which "
                + ("holds characters that no header may have" if value else "is not set"),
                do="Set this variable where the hub is started.",
            )
        return {"Authorization": value}

    def concealed(self, text: str) -> str:
        """Return a server's text without the key, in case the server repeats the key."""
        for value in self.headers.values():
            for secret in (value, value.rpartition(" ")[2]):
                text = text.replace(secret, MASK)
        return text

    @property
    def action_form(self) -> Literal["field", "json", "tools"]:
        return self.form or ("field" if self.action else "json")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if (self.action_form == "field") != bool(self.action):
            raise ValueError('action names the field for the answer, and is needed with form = "field" alone')
        if self.tools and self.action_form != "tools":
            raise ValueError('tools must be left out unless form = "tools"')
        if self.action_form == "tools" and self.constants:
            raise ValueError('constants must be left out with form = "tools"')
        low, high = self.reward_bounds
        if not low < high:
            raise ValueError("the first of reward_bounds must be lower than the second")
        if self.reward_if_lost is not None and not low <= self.reward_if_lost <= high:
            raise ValueError("reward_if_lost must be within reward_bounds")
        return self
