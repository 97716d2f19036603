"""Cases: a training run with its settings, its sampler, and the distance of its nodes.

A case that several tables name runs once for each seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from echo_hub.config.sections import HubConfig
from echo_hub.learner.sft_plan import SftSettings

SEEDS: Final = 3
MOST_SEEDS: Final = 6
"""Largest seed count of a table, which keeps the seeds of `--seed 0` and `--seed 1` disjoint."""
STEPS: Final = 40
GROUPS: Final = 16
"""A step."""

Runner = Literal["virtual", "episodes", "trl", "untrained", "finetuned"]
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way to train."""

    name: str
    settings: Settings = field(default_factory=dict)
    """Sections of a config.toml that differ from those of all cases."""
    runner: Runner = "virtual"
    """virtual: the hub's own coordinator and learner in virtual time. episodes: the learner draws for itself, with
    games of several turns. trl: GRPOTrainer. untrained: the base is only evaluated. finetuned: `echo-hub sft`."""
    start: Case | None = None
    """A `finetuned` case whose result this case begins with."""
    demonstrations: int = 0
    sft: SftSettings | None = None
    """Settings of a `finetuned` case."""
    same_draws: bool = False
    """True if TRL's trainer begins with the hub's own adapter, and draws with its sampler and seeds."""
    precision: str = "policy"
    """The sampler: `policy` for the learner's own model, or a precision of the node's llama.cpp engine."""
    delay_s: float | None = None
    """Delay between hub and nodes, each way; None for nodes that take no time."""
    evaluate_every: int = 10
    seconds: float = 10.0
    """Expected time of one seed's run on one core."""

    def runs(self, seeds: int) -> int:
        """Return the number of different runs. Untrained and fine-tuned cases are the same for all seeds."""
        return 1 if self.runner in ("untrained", "finetuned") else seeds

    def config(self, seed: int) -> HubConfig:
        """Configuration of a run. Raises ValueError for settings that do not fit."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"mode": "colocated", "seed": seed},
            "sampling": {"max_tokens": 6},
            "training": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": 8},
            "learner": {"threads": 1, "device": "cpu"},
            "evaluation": {"problems": 512},
            "trust": {"verifier": "off"},  # The nodes are the learner's own policy, or engines of this process.
        }
        for section, values in self.settings.items():
            sections.setdefault(section, {}).update(values)
        return HubConfig.model_validate(sections)


def stale(bound: int, **settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Settings of an asynchronous run that trains on rollouts of this age."""
    return {"run": {"mode": "async"}, **settings, "training": {"max_staleness": bound, **settings.get("training", {})}}


COLOCATED: Final = Case(name="co-located")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
ASYNC: Final = Case(name="async, S = 2", settings=stale(2))


def smaller(case: Case, sizes: Settings) -> Case:
    """Make the case smaller for tests: put `sizes` over its settings."""
    sections = {*case.settings, *sizes}
    merged = {name: {**case.settings.get(name, {}), **sizes.get(name, {})} for name in sections}
    return replace(case, settings=merged)
