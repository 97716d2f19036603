"""Options of verifiers environments. The environments themselves run in `echo_hub.sessions.inside.verifiers_server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from echo_hub.tasks.options import TaskOptions


class VerifiersOptions(TaskOptions):
    """Options of a task `verifiers:TASKSET`."""

    env: dict[str, Any] = Field(default_factory=dict)
    """verifiers' own section [env], such as {"taskset": {"num_tasks": 100}, "agent": {"harness": {"id": "bash"}}}. A
    key may also be written with dots: "env.taskset.num_tasks" = 100."""
    harness: str = "null"
    """Agent program, unless `env` or the package names one. `null` is a chat loop with the task's tools. `bash` also
    runs shell commands."""
    renderer: str | dict[str, Any] = "auto"
    """Name of the renderer that writes the base model's chat, such as "qwen3", or its settings as a table. `auto`
    finds it by the base model's name."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward of an episode: the sum of verifiers' rewards, each times its weight. An episode that is
    lost or refused earns the lowest."""
    max_turns: Annotated[int, Field(ge=0)] = 0
    """Largest number of turns of an episode; 0 = no limit but the base model's context."""
    rows: Annotated[int, Field(ge=1)] = 10_000
    """Largest number of tasks that are read from the taskset."""
    workers: Annotated[int, Field(ge=1, le=64)] = 4
    """Largest number of processes that play episodes. Each plays up to 128 episodes at once before the next process
    starts."""
    save_traces: bool = False
    """True = write verifiers' own record of each finished episode to traces.jsonl in the environment's directory."""

    @model_validator(mode="before")
    @classmethod
    def _without_dots(cls, given: Any) -> Any:
        """Put keys with dots, such as "env.taskset.num_tasks", into `env`."""
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if not str(name).startswith("env.")}
        for name, value in given.items():
            if name in found:
                continue
            place = found["env"] = dict(found.get("env") or {})
            *folders, last = name.split(".")[1:]
            for folder in folders:
                place[folder] = dict(place.get(folder) or {})
                place = place[folder]
            place[last] = value
        return found

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError("bounds must be two numbers, the lower one first")
        return self

    @property
    def declared(self) -> Mapping[str, Any]:
        # verifiers itself counts the turns: an episode that reaches `max_turns` then gets the score that its package
        # defines.
        return {"reward_bounds": self.bounds, "reward_if_lost": self.bounds[0], "max_turns": 0}
