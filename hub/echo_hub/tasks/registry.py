"""Create tasks by their names in the settings."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from typing import Any

from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Task
from echo_hub.tasks.environments.base import AnyEnvironment
from echo_hub.tasks.environments.calculator import make_calculator
from echo_hub.tasks.environments.guess import make_guess
from echo_hub.tasks.environments.sokoban import make_sokoban
from echo_hub.tasks.jsonl import make_jsonl
from echo_hub.tasks.names import FORMS, nearest_name
from echo_hub.tasks.reasoning_gym import make_reasoning_gym
from echo_hub.tasks.sums import make_sums
from echo_hub.tasks.worked import make_worked
from echo_shared.errors import ConfigError


def make_task(name: str, options: Mapping[str, Any]) -> Task | AnyEnvironment:
    """Create the task with this `name`, one of `echo_hub.tasks.names.FORMS`.

    For `python:<module>:<function>`, the function is called with the options. Raises ConfigError for an unknown name.
    """
    kind, _, dataset = name.partition(":")
    match kind:
        case "arithmetic" if not dataset:
            return make_arithmetic(options)
        case "worked" if not dataset:
            return make_worked(options)
        case "sums" if not dataset:
            return make_sums(options)
        case "jsonl" if not dataset:
            return make_jsonl(options)
        case "python":
            return _make_own(dataset, options)
        case "reasoning-gym":
            return make_reasoning_gym(dataset, options)
        case "environment" if dataset == "guess":
            return make_guess(options)
        case "environment" if dataset == "calculator":
            return make_calculator(options)
        case "environment" if dataset == "sokoban":
            return make_sokoban(options)
    nearest = nearest_name(name)
    raise ConfigError(
        "There is no such task.",
        got=f"task.name = {name!r}" + (f"; did you mean {nearest}?" if nearest else ""),
        do=f"Use one of {', '.join(FORMS)}.",
    )


def _make_own(place: str, options: Mapping[str, Any]) -> Task | AnyEnvironment:
    module, _, function = place.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "The function that makes the task cannot be imported.",
            got=f"task.name = 'python:{place}': {error}",
            do="Write python:MODULE:FUNCTION, with a module that this hub's Python finds (see PYTHONPATH).",
        ) from error
    except Exception as error:
        # The module is the operator's plug-in. Its import may raise any exception, and the operator must see the
        # reason.
        raise _failed(place, error) from error
    try:
        task: Task | AnyEnvironment = make(options)
    except ConfigError:
        raise
    except Exception as error:
        raise _failed(place, error) from error
    lacking = [name for name in ("name", "sample") if not hasattr(task, name)]
    if not any(hasattr(task, name) for name in ("score", "respond", "open")):
        lacking.append("score (or respond or open, of several turns)")
    if lacking:
        raise ConfigError(
            "What the function returns is not a task.",
            got=f"task.name = 'python:{place}': {type(task).__name__} without {', '.join(lacking)}",
            do="Return an object like those in echo_hub/tasks/base.py. For a working one: echo-hub new-task NAME",
        )
    return task


def _failed(place: str, error: Exception) -> ConfigError:
    *_, (raised_in, line) = traceback.walk_tb(error.__traceback__)
    return ConfigError(
        "The function that makes the task has failed.",
        got=f"task.name = 'python:{place}': {error!r} ({raised_in.f_code.co_filename}, line {line})",
        do="Mend the module, and try again: echo-hub try-task",
    )
