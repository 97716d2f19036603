"""Non-default settings of `echo-hub demo` for each demo task.

The first task is sums of three-digit numbers, with the smallest base model and one number per completion. The other
tasks use a base model that writes a calculation before the answer. Their completion lengths differ by a factor of ten
or more. So a batch waits for its longest completion, and nodes hold many completions at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

Settings = dict[str, dict[str, Any]]
"""Settings by section, as `load_config` accepts them."""


class DemoTask(StrEnum):
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
"""Settings of every demo task. Nodes behave as if on other machines: no shared memory, and adapters come through the
BitTorrent swarm.
"""

_SMALL: Final[Settings] = {
    "model": {"base": "builtin:small"},
    "training": {"steps": 40, "groups_per_step": 16, "learning_rate": 1e-3},
    "evaluation": {"problems": 256},
}
"""Settings of the demo tasks whose completions contain a written calculation. The model is four times as large and
completions are long, but a step takes only a few seconds on one core."""

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
    layers = (_COMMON, _OF_TASK[task], flags)
    sections = {name for layer in layers for name in layer}
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in sections}
