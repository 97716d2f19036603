"""A real learner that is slowed down to a fixed speed: each step takes `STEP_S` seconds or more.

The real step is trained; then the process sleeps for the rest of the time, and counts the sleep as training. So a step
takes the same time on a busy machine.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any, Final

from benchmarks.harness.hub_with_learner import train_by
from echo_hub.learner import step
from echo_shared.records.step_figures import TRAIN_S

STEP_S: Final = "ECHO_BENCH_STEP_S"
"""Name of the environment variable with the minimum duration of a training step, in seconds."""


def paced_step(*arguments: Any, **named: Any) -> step.StepOutcome:
    """Train like `echo_hub.learner.step.screened_step`, then sleep until the step has lasted `STEP_S` seconds."""
    began = time.perf_counter()
    outcome = step.screened_step(*arguments, **named)
    time.sleep(max(0.0, began + float(os.environ[STEP_S]) - time.perf_counter()))
    return replace(outcome, metrics={**outcome.metrics, TRAIN_S.key: time.perf_counter() - began})


if __name__ == "__main__":
    sys.exit(train_by(paced_step))
