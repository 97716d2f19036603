"""Non-default settings of `echo-hub demo` for each demo task.

The first task is sums of three-digit numbers, with the smallest base model and one number per completion. The other
tasks use a base model that writes a calculation before the answer. Their completion lengths differ by a factor of ten
or more. So a batch waits for its longest completion, and nodes hold many completions at a time.

Questions in English need a language model: SmolLM2-135M-Instruct from a package of its own, 170 times as large as the
smallest. With this model a step costs ten seconds or more of a core, so prompts and completions are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from echo_hub.run.packaged_base import SMOLLM2, packaged_base
from echo_shared.errors import ConfigError

Settings = dict[str, dict[str, Any]]
"""Settings by section, as `load_config` accepts them."""


class DemoTask(StrEnum):
    ARITHMETIC = "arithmetic"
    WORKED = "worked"
    KNIGHTS_KNAVES = "knights-knaves"
    SOKOBAN = "sokoban"
    SUMS = "sums"


class DemoBase(StrEnum):
    BUILTIN = "builtin"
    SMOLLM2 = "smollm2"


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
    DemoTask.SUMS: {
        "task": {
            "name": "sums",
            "prompt_suffix": " Answer with the number only.",
            "scorer_processes": 1,
        },
        # With the default value, the activations of a step would take 5 GB.
        "learner": {"micro_batch_tokens": 4_096},
        "training": {"steps": 20, "groups_per_step": 10, "group_size": 16, "learning_rate": 1.5e-4},
        "sampling": {"max_tokens": 16, "temperature": 0.7},
        "evaluation": {"problems": 256},
    },
}


def demo_task(task: DemoTask | None, base: DemoBase | None) -> DemoTask:
    """Return the task to demonstrate. Each base has a default task, and each task belongs to one base.

    Raises ConfigError if `task` and `base` do not belong together.
    """
    if task is None:
        return DemoTask.SUMS if base is DemoBase.SMOLLM2 else DemoTask.ARITHMETIC
    needed = DemoBase.SMOLLM2 if task is DemoTask.SUMS else DemoBase.BUILTIN
    if base not in (None, needed):
        raise ConfigError(
            "The demo has no settings for this base model and this task.",
            got=f"--base {base} --task {task}",
            do=f"Omit one of the two: the task {task} belongs to --base {needed}.",
        )
    return task


def demo_precision(task: DemoTask) -> str:
    """Return the precision of the nodes' engines.

    For a language model it is float32, the verifier's own precision. The verifier would have to measure every other
    rounding by emulation. For each early version, that takes a quarter of a minute, while the learner waits for checks.
    """
    return "f32" if task is DemoTask.SUMS else "auto"


def demo_settings(task: DemoTask, flags: Settings) -> Settings:
    """Return the settings of a demo, with `flags` given by the user. Raises ConfigError if the task's base model is not
    installed.
    """
    base: Settings = {"model": {"base": str(packaged_base(SMOLLM2))}} if task is DemoTask.SUMS else {}
    layers = (_COMMON, base, _OF_TASK[task], flags)
    sections = {name for layer in layers for name in layer}
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in sections}
