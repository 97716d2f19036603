"""The learning rate over a run: warm-up, then constant or decay."""

from __future__ import annotations

import math

from echo_hub.config.training_sections import TrainingConfig


def share_of_highest(training: TrainingConfig, step: int, *, steps_before: int = 0) -> float:
    """Return the learning rate of step `step`, counted from 1, as a share (0..1) of the full rate.

    `steps_before` is the number of earlier steps of the run that the schedule does not cover. The share rises linearly
    and reaches 1 in the step after `warmup_steps`. Then it stays 1, or decays; it would reach `final_share` one step
    after the run's end.
    Decay is linear, or along half a cosine (SGDR, arXiv 1608.03983, equation 5).
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
