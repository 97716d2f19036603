"""Environment variables of a process that computes with the learner's model."""

from __future__ import annotations

import os

from echo_hub.config.training_sections import LearnerConfig


def environment(learner: LearnerConfig) -> dict[str, str]:
    """Return the variables that PyTorch's libraries read when they are loaded."""
    variables = {
        # Without it, CUDA matrix products may give other bits at each repetition.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # OpenMP's threads wait for each other after every operation. By default they wait in a loop that keeps a core
        # busy, which other programs on the machine then lack, and the late thread, too.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    if learner.threads:
        variables["OMP_NUM_THREADS"] = str(learner.threads)
    return variables
