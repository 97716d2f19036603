"""What `echo-hub demo` runs: the settings of each of its tasks, where they differ from the defaults.

The first task is sums in three digits by the smallest base model, one number a completion. The others are for a base
that works before it answers: their completions differ in length by a factor of ten and more, so that a batch waits for
its longest and nodes hold many at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

Settings = dict[str, dict[str, Any]]
"""By section, as `load_config` takes them."""


class DemoTask(StrEnum):
    """What the demo's model can be taught."""

    ARITHMETIC = "arithmetic"
    WORKED = "worked"
    KNIGHTS_KNAVES = "knights-knaves"
    SOKOBAN = "sokoban"


_COMMON: Final[Settings] = {
    "run": {"name": "demo"},
    "learner": {"threads": 1},
    "server": {"shared_memory": False},
    "dissemination": {"way": "swarm"},
}
"""The demo's nodes stand for those of other hosts."""

_SMALL: Final[Settings] = {
    "model": {"base": "builtin:small"},
    "training": {"steps": 40, "groups_per_step": 16, "learning_rate": 1e-3},
    "evaluation": {"problems": 256},
}
"""Batches by which a step takes some seconds on one core, four times as large a model and long completions at that."""

_OF_TASK: Final[Mapping[DemoTask, Settings]] = {
    DemoTask.ARITHMETIC: {
        "task": {"scorer_processes": 1},
        "training": {"steps": 60},
        "sampling": {"max_tokens": 6},
        "evaluation": {"problems": 512},
    },
    DemoTask.WORKED: {
        **_SMALL,
        "task": {"name": "worked", "options": {"operations": ["+", "*"]}},
        "sampling": {"max_tokens": 320},
    },
    DemoTask.KNIGHTS_KNAVES: {
        **_SMALL,
        "task": {
            "name": "reasoning-gym:knights_knaves",
            "options": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
        },
        "sampling": {"max_tokens": 160},
    },
    DemoTask.SOKOBAN: {
        **_SMALL,
        "task": {"name": "environment:sokoban"},
        "sampling": {"max_tokens": 16},
    },
}


def demo_settings(task: DemoTask, flags: Settings) -> Settings:
    """The demo's settings for `task`; what `flags` names it overrides."""
    layers = (_COMMON, _OF_TASK[task], flags)
    sections = {name for layer in layers for name in layer}
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in sections}
