"""Cases: the mode of the run, its staleness bound, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from echo_hub.config.sections import HubConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way to train. Each case runs once for each seed."""

    name: str
    mode: str
    max_staleness: int = 0
    objective: dict[str, Any] = field(default_factory=dict)
    steps: int = 60
    groups_per_step: int = 32
    group_size: int = 8
    problems: int = 1024
    """Held-out problems."""
    base: str = "builtin:tiny"
    task: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 6

    def config(self, seed: int) -> HubConfig:
        return HubConfig.model_validate(
            {
                "run": {"mode": self.mode, "seed": seed},
                "model": {"base": self.base},
                "task": self.task,
                "sampling": {"max_tokens": self.max_tokens},
                "training": {
                    "steps": self.steps,
                    "groups_per_step": self.groups_per_step,
                    "group_size": self.group_size,
                    "max_staleness": self.max_staleness,
                },
                "objective": self.objective,
                "learner": {"threads": 1, "device": "cpu"},
                "evaluation": {"problems": self.problems},
                "trust": {"verifier": "off"},  # Its nodes are the learner's own policy.
            }
        )


COLOCATED: Final = Case(name="colocated", mode="colocated")
SEQUENTIAL: Final = Case(name="sequential", mode="sequential")
BY_STALENESS: Final = {
    bound: Case(name=f"async S={bound}", mode="async", max_staleness=bound) for bound in (1, 2, 4, 8)
}
CORRECTED_8: Final = (
    Case(name="AIPO S=8", mode="async", max_staleness=8, objective={"name": "aipo"}),
    Case(
        name="decoupled PPO S=8",
        mode="async",
        max_staleness=8,
        objective={"name": "decoupled_ppo"},
    ),
)
UNCORRECTED_8: Final = Case(
    name="GRPO without ratio S=8", mode="async", max_staleness=8, objective={"name": "grpo", "old_policy": "proximal"}
)
ALL: Final = (COLOCATED, SEQUENTIAL, *BY_STALENESS.values(), *CORRECTED_8, UNCORRECTED_8)

FLEET: Final = tuple(
    Case(
        name=f"a real fleet, S={bound}",
        mode="async",
        max_staleness=bound,
        base="builtin:small",
        task={"name": "worked", "options": {"operations": ["+", "*"]}},
        max_tokens=320,
        steps=30,
        groups_per_step=12,
        group_size=4,
        problems=128,
    )
    for bound in (1, 4)
)
"""Completions of ten to three hundred tokens, by the nodes of a recording."""
