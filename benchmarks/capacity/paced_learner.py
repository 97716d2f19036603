"""The learner's process with a pace of its own: `echo_hub.learner.serve`, each of whose steps lasts `STEP_S` or more.

The real step is trained; behind it the process sleeps for what is left, and counts it as training. So a step takes the
same time on a busy machine, which has much else to do in a run on one machine. `paced_hub` starts it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch.optim import Optimizer

from echo_hub.learner import serve, step, within_memory
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.step_figures import TRAIN_S

STEP_S: Final = "ECHO_BENCH_STEP_S"
"""The environment variable with the seconds that a step takes at least."""


def screened_step(
    policy: Policy,
    optimizer: Optimizer,
    groups: Sequence[TrainingGroup],
    settings: LearnerSettings,
    *,
    learner_version: int,
    history: History = NO_HISTORY,
) -> step.Outcome:
    """As `echo_hub.learner.step.screened_step`."""
    began = time.perf_counter()
    outcome = step.screened_step(policy, optimizer, groups, settings, learner_version=learner_version, history=history)
    time.sleep(max(0.0, began + float(os.environ[STEP_S]) - time.perf_counter()))
    return replace(outcome, metrics={**outcome.metrics, TRAIN_S.key: time.perf_counter() - began})


def main() -> int:
    assert vars(within_memory)["screened_step"] is step.screened_step, "what every step is trained by"
    vars(within_memory)["screened_step"] = screened_step
    return serve.main()


if __name__ == "__main__":
    sys.exit(main())
