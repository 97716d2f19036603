"""The weight of the entropy bonus in a step's loss: constant, or adapted to keep the entropy at a target.

With `objective.entropy_target`, where e is the entropy measured by the step before:

    c_1 = objective.entropy_coefficient
    c_k = c_{k-1} + Δ where e < target, c_{k-1} - Δ where e > target; within 0 .. objective.entropy_max
    α_k = c_k where e <= target, else 0

α_k is the weight in step k, and Δ is objective.entropy_delta. A step without trained tokens measures no entropy and
leaves e unchanged. In the first step e is unknown, so α is 0.

Source: adaptive entropy control of Skywork-OR1 (arXiv 2505.22312, section 3.2.5; the upper bound is from its code).
Departure: there, e is the entropy of the step's own batch before its update, which needs an extra forward pass. Here e
comes from the previous step, whose training pass computes the entropy anyway.
"""

from __future__ import annotations

from dataclasses import replace

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner.history import History


def adapt(history: History, objective: ObjectiveConfig) -> tuple[History, float]:
    """Return the history with the next step's coefficient c, and the entropy weight α in that step's loss."""
    target = objective.entropy_target
    if not target:
        return replace(history, entropy_coefficient=None), objective.entropy_coefficient
    coefficient, entropy = history.entropy_coefficient, history.newest_entropy
    if coefficient is None:
        coefficient = objective.entropy_coefficient
    elif entropy is not None and entropy != target:
        coefficient += objective.entropy_delta if entropy < target else -objective.entropy_delta
    coefficient = min(max(0.0, coefficient), objective.entropy_max)
    below = entropy is not None and entropy <= target
    return replace(history, entropy_coefficient=coefficient), coefficient if below else 0.0
