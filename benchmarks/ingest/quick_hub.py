"""`echo-hub`, with the same commands, whose learner's process is `quick_learner`."""

from __future__ import annotations

from collections.abc import Sequence

from echo_hub import main
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import process


def quick(learner: LearnerConfig) -> Sequence[str]:
    """What the learner's process is, for one on this machine alone."""
    return ("benchmarks.ingest.quick_learner",)


if __name__ == "__main__":
    vars(process)["_command"] = quick
    main.run()
