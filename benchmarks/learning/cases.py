"""Cases: settings of a training run, with its mode, its staleness bound and its objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from benchmarks.harness.site import Settings, merged
from echo_hub.config.sections import HubConfig

OF_ALL: Final[Settings] = {
    "run": {"mode": "colocated"},
    "sampling": {"max_tokens": 6},
    "learner": {"threads": 1, "device": "cpu"},
    "trust": {"verifier": "off"},  # The nodes are the learner's own policy, or engines of this process.
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way to train. Each case runs once for each seed."""

    sizes: ClassVar[Settings] = {
        "training": {"steps": 60, "groups_per_step": 32, "group_size": 8},
        "evaluation": {"problems": 1024},
    }
    name: str
    settings: Settings = field(default_factory=dict)
    """Sections of a config.toml that differ from those of all cases."""

    def config(self, seed: int) -> HubConfig:
        """Configuration of a run. Raises ValueError for settings that do not fit."""
        sections = merged(merged(OF_ALL, self.sizes), self.settings)
        return HubConfig.model_validate(merged(sections, {"run": {"seed": seed}}))


def stale(bound: int, **settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of an asynchronous run that trains on rollouts that are `bound` steps old."""
    return {"run": {"mode": "async"}, **settings, "training": {"max_staleness": bound, **settings.get("training", {})}}


COLOCATED: Final = Case(name="colocated")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
BY_STALENESS: Final = {bound: Case(name=f"async S={bound}", settings=stale(bound)) for bound in (1, 2, 4, 8)}
CORRECTED_8: Final = (
    Case(name="AIPO S=8", settings=stale(8, objective={"name": "aipo"})),
    Case(name="decoupled PPO S=8", settings=stale(8, objective={"name": "decoupled_ppo"})),
)
UNCORRECTED_8: Final = Case(
    name="GRPO without ratio S=8", settings=stale(8, objective={"name": "grpo", "old_policy": "proximal"})
)
ALL: Final = (COLOCATED, SEQUENTIAL, *BY_STALENESS.values(), *CORRECTED_8, UNCORRECTED_8)

FLEET: Final = tuple(
    Case(
        name=f"a real fleet, S={bound}",
        settings=stale(
            bound,
            model={"base": "builtin:small"},
            task={"name": "worked", "options": {"operations": ["+", "*"]}},
            sampling={"max_tokens": 320},
            training={"steps": 30, "groups_per_step": 12, "group_size": 4},
            evaluation={"problems": 128},
        ),
    )
    for bound in (1, 4)
)
"""Completions of ten to three hundred tokens, by the nodes of a recording."""
