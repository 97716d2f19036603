"""Environment variables of a process that computes with the learner's model."""

from __future__ import annotations

import os
from typing import Final

from echo_hub.config.training_sections import LearnerConfig

SPINS: Final = 10_000
"""Number of loops in which a thread of GNU OpenMP waits for the others before it sleeps.

By default such a thread spins much longer. It keeps a core busy that other programs need, and that the slower thread
needs too. Measured with layers of 576 by 1536 weights on two cores: 3.6 steps a second by default and 3.9 with this
number on a calm machine; 0.63 and 1.25 next to two busy programs.
"""


def environment(learner: LearnerConfig) -> dict[str, str]:
    """Return the variables that PyTorch's libraries read when they are loaded."""
    # Without CUBLAS_WORKSPACE_CONFIG, CUDA matrix products may give other bits at each repetition.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if learner.threads:
        variables["OMP_NUM_THREADS"] = str(learner.threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", str(SPINS))
    return variables
