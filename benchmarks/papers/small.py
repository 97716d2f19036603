"""Cases with `builtin:small`, whose completions are long."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.papers.cases import Case

SMALL: Final = {"model": {"base": "builtin:small"}}

LARGE: Final = Case(
    name="builtin:small as it is, with working",
    settings={
        **SMALL,
        "task": {"name": "worked", "options": {"shortest": 3, "longest": 3}},
        "sampling": {"max_tokens": 160},
        "evaluation": {"problems": 256},
    },
    runner="untrained",
    seconds=40,
)
"""Three-digit sums, as every case of `builtin:tiny` has them, by the model of four times its weights."""

KNIGHTS: Final = Case(
    name="builtin:small",
    settings={
        **SMALL,
        "task": {
            "name": "reasoning-gym:knights_knaves",
            "options": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
        },
        "sampling": {"max_tokens": 160},
        "training": {"steps": 20, "groups_per_step": 12, "learning_rate": 1e-4},
        "evaluation": {"problems": 256},
    },
    seconds=200,
)
BOARDS: Final[dict[str, Any]] = {"size": 4, "inner_walls": 2, "boxes": 1}
SOKOBAN: Final = Case(
    name="builtin:small, four rounds",
    settings={
        **SMALL,
        "task": {"name": "environment:sokoban", "options": BOARDS},
        "sampling": {"max_tokens": 16},
        "training": {"steps": 20},
        "evaluation": {"problems": 256},
    },
    runner="episodes",
    seconds=480,
)
