"""Cases with `builtin:small`, whose completions are long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.papers.cases import Case
from echo_hub.learner.sft_plan import SftSettings

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
    seconds=4,
)
"""Three-digit sums, the task of all cases of `builtin:tiny`, with a model of four times its weights."""

KNIGHTS: Final[dict[str, Mapping[str, Any]]] = {
    **SMALL,
    "task": {
        "name": "reasoning-gym:knights_knaves",
        "options": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
    },
    "sampling": {"max_tokens": 160},
    "training": {"steps": 20, "groups_per_step": 12, "learning_rate": 5e-4},
    "evaluation": {"problems": 256},
}
DEMONSTRATED: Final = Case(
    name="builtin:small, fine-tuned",
    settings=KNIGHTS,
    runner="finetuned",
    demonstrations=1_000,
    sft=SftSettings(epochs=1, batch_tokens=2_048, learning_rate=2e-3, heldout=0.03),
    seconds=100,
)
TRAINED_KNIGHTS: Final = Case(
    name="builtin:small, fine-tuned, then trained", settings=KNIGHTS, start=DEMONSTRATED, seconds=120
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
    seconds=200,
)
