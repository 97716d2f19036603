"""`echo-hub` with the same commands, but its learner process runs another module (`LEARNER`).

That module calls `train_by` with a function that replaces `echo_hub.learner.step.screened_step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from echo_hub import main
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import process

MODULE: Final = "benchmarks.harness.hub_with_learner"
LEARNER: Final = "ECHO_BENCH_LEARNER"
"""Name of the environment variable with the module that the learner process runs."""


def command(learner: LearnerConfig) -> Sequence[str]:
    """Return the arguments after `python -m` that start the learner process, on this machine, with the module that the
    variable `LEARNER` names.
    """
    return (os.environ[LEARNER],)


def train_by(screened_step: Callable[..., object]) -> int:
    """Serve as the learner process, and train every step with the function `screened_step`. Return the exit status."""
    # Import late: the hub's own process imports this module too, but must not load torch.
    from echo_hub.learner import serve, step, within_memory

    assert vars(within_memory)["screened_step"] is step.screened_step, "every step is trained by this function"
    vars(within_memory)["screened_step"] = screened_step
    return serve.main()


if __name__ == "__main__":
    vars(process)["_command"] = command
    main.run()
