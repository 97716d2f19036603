"""Every task by its name in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Task
from echo_hub.tasks.reasoning_gym import make_reasoning_gym
from echo_shared.errors import ConfigError


def make_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task called `name`: `arithmetic`, or `reasoning-gym:<dataset>`. Raises ConfigError for any other."""
    kind, _, dataset = name.partition(":")
    match kind:
        case "arithmetic" if not dataset:
            return make_arithmetic(options)
        case "reasoning-gym":
            return make_reasoning_gym(dataset, options)
    raise ConfigError(
        "There is no such task.", got=f"task.name = {name!r}", do="Use arithmetic or reasoning-gym:<dataset>."
    )
