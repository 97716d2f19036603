"""All objectives, by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from echo_hub.config.objective_defaults import PUBLISHED
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.objectives.aipo import Aipo
from echo_hub.learner.objectives.base import Objective
from echo_hub.learner.objectives.cispo import Cispo
from echo_hub.learner.objectives.dapo import Dapo
from echo_hub.learner.objectives.decoupled_ppo import DecoupledPpo
from echo_hub.learner.objectives.dr_grpo import DrGrpo
from echo_hub.learner.objectives.grpo import Grpo
from echo_hub.learner.objectives.gspo import Gspo
from echo_hub.learner.objectives.sapo import Sapo
from echo_hub.learner.objectives.two_sided import TwoSided
from echo_hub.learner.objectives.vespo import Vespo

OBJECTIVES: Final[Mapping[str, Callable[..., Objective]]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "aipo": Aipo,
    "decoupled_ppo": DecoupledPpo,
    "two_sided": TwoSided,
    "sapo": Sapo,
    "vespo": Vespo,
}


def make_objective(settings: ObjectiveConfig) -> Objective:
    """Return the objective of `settings`. A number that is 0 in the settings gets the value of the objective's
    paper.
    """
    resolved = settings.resolved()
    numbers = {name: getattr(resolved, name) for name in PUBLISHED[settings.name].numbers}
    return OBJECTIVES[settings.name](**numbers)
