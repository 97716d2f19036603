"""The launcher is `echo-hub`, and its learner is the paced one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks.capacity.paced_hub import paced
from echo_hub.config.training_sections import LearnerConfig


def test_it_has_the_commands_of_a_hub() -> None:
    command = [sys.executable, "-m", "benchmarks.capacity.paced_hub", "serve", "--help"]
    assert "--dry-run" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_its_learner_is_a_module() -> None:
    (module,) = paced(LearnerConfig())
    assert importlib.util.find_spec(module) is not None
