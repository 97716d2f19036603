"""A learner process whose steps take no time, because it computes no gradient.

The rest is real: the process gets every batch, writes checkpoints, exports versions and reports each step. So the hub's
cost of a step can be measured on two cores, which could not train on thousands of rollouts a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness.hub_with_learner import train_by
from echo_hub.learner import step
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.screen import ScreenFindings
from echo_hub.learner.settings import TrainingGroup
from echo_shared.records.step_figures import GRAD_NORM, TRAIN_S


def untrained_step(
    _policy: object,
    _optimizer: object,
    groups: Sequence[TrainingGroup],
    *_: Any,
    history: History = NO_HISTORY,
    **__: Any,
) -> step.StepOutcome:
    """Replace `echo_hub.learner.step.screened_step`, but compute no gradient."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mean_reward = float(np.mean([rollout.reward for rollout in rollouts]))
    turns = [max(1, len(rollout.draws)) for rollout in rollouts]
    return step.StepOutcome(
        metrics={"mean_reward": mean_reward, GRAD_NORM.key: 0.0, TRAIN_S.key: 0.0},
        screen=ScreenFindings().frame(turns),
        history=history,
    )


if __name__ == "__main__":
    sys.exit(train_by(untrained_step))
