"""The learner's process, `echo_hub.learner.serve`, whose steps take no time: no gradient is computed.

All else is real: it is sent every batch, writes checkpoints, exports and tells of each step. So a machine of two cores
shows what steps cost the hub, though nobody there could train on thousands of rollouts a second. `quick_hub` starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from torch.optim import Optimizer

from echo_hub.learner import serve, step, within_memory
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.policy import Policy
from echo_hub.learner.screen import Findings
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.step_figures import GRAD_NORM, TRAIN_S


def untrained_step(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
    *,
    learner_version: int,
    history: History = NO_HISTORY,
) -> step.Outcome:
    """In place of `echo_hub.learner.step.screened_step`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        "mean_reward": float(np.mean([rollout.reward for rollout in rollouts])),
        GRAD_NORM.key: 0.0,
        TRAIN_S.key: 0.0,
    }
    turns = [max(1, len(rollout.draws)) for rollout in rollouts]
    return step.Outcome(metrics=metrics, screen=Findings().frame(turns), history=history)


def main() -> int:
    assert vars(within_memory)["screened_step"] is step.screened_step, "what every step is trained by"
    vars(within_memory)["screened_step"] = untrained_step
    return serve.main()


if __name__ == "__main__":
    sys.exit(main())
