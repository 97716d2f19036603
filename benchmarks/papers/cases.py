"""What is run: a whole training run with its settings, who draws for it, and how far away that is.

A case that several tables name is run once a seed for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from echo_hub.config.sections import HubConfig
from echo_hub.learner.sft_plan import SftSettings

SEEDS: Final = 3
MOST_SEEDS: Final = 6
"""Of any table: the runs of `--seed 1` share none with those of `--seed 0`."""
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
    """A config.toml's sections, where they differ from what every case has."""
    runner: Runner = "virtual"
    """virtual: the hub's own coordinator and learner in virtual time. episodes: the learner draws for itself, games of
    several turns too. trl: GRPOTrainer. untrained: the base as it is is evaluated. finetuned: `echo-hub sft`."""
    start: Case | None = None
    """What it begins with: what another case, which is `finetuned`, has come to."""
    demonstrations: int = 0
    sft: SftSettings | None = None
    """How a case that is `finetuned` is trained on its demonstrations."""
    same_draws: bool = False
    """TRL's trainer begins with the hub's own adapter, and draws by its sampler and seeds."""
    precision: str = "policy"
    """Who draws: policy is the learner's own model; else the node's llama.cpp engine, in this precision."""
    delay_s: float | None = None
    """From the hub to each node, and back; None: nodes are as fast as can be."""
    evaluate_every: int = 10
    seconds: float = 10.0
    """About, of one seed's run, on one core of a server."""

    def runs(self, seeds: int) -> int:
        """What is not trained is the same by every seed; all seeds begin with the same warm start."""
        return 1 if self.runner in ("untrained", "finetuned") else seeds

    def config(self, seed: int) -> HubConfig:
        """Raises ValueError for settings that do not fit."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"mode": "colocated", "seed": seed},
            "sampling": {"max_tokens": 6},
            "training": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": 8},
            "learner": {"threads": 1, "device": "cpu"},
            "evaluation": {"problems": 512},
            "trust": {"verifier": "off"},  # Its nodes are the learner's own policy, or engines of this process.
        }
        for section, values in self.settings.items():
            sections.setdefault(section, {}).update(values)
        return HubConfig.model_validate(sections)


def stale(bound: int, **settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The settings of an asynchronous run that trains on rollouts of that age."""
    return {"run": {"mode": "async"}, **settings, "training": {"max_staleness": bound, **settings.get("training", {})}}


COLOCATED: Final = Case(name="co-located")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
ASYNC: Final = Case(name="async, S = 2", settings=stale(2))


def smaller(case: Case, sizes: Settings) -> Case:
    """The same case with `sizes` over its settings; for tests."""
    sections = {*case.settings, *sizes}
    merged = {name: {**case.settings.get(name, {}), **sizes.get(name, {})} for name in sections}
    return replace(case, settings=merged)
