"""How the learning rate changes over a run: up to its highest, and down from it."""

from __future__ import annotations

import math

from echo_hub.config.training_sections import TrainingConfig


def share_of_highest(training: TrainingConfig, step: int, *, steps_before: int = 0) -> float:
    """What step `step`, from 1 on, takes of the learning rate, in 0..1. `steps_before`: of the run's, that are none of
    the schedule's.

    It rises linearly and is whole in the step behind `warmup_steps`. From there on it is constant, or falls so that
    `final_share` would be left in the step behind the run's last: linearly, or by half a cosine (SGDR, arXiv
    1608.03983, equation 5).
    """
    step, steps = step - steps_before, training.steps - steps_before
    whole = training.warmup_steps + 1
    if step < whole:
        return step / whole
    if training.schedule == "constant" or steps < whole:
        return 1.0
    progress = min(1.0, (step - whole) / (steps + 1 - whole))
    left = 1 - progress if training.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return training.final_share + (1 - training.final_share) * left
