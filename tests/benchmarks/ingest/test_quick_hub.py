"""The launcher is `echo-hub`, and its learner is the quick one."""

from __future__ import annotations

import importlib.util

from benchmarks.ingest.quick_hub import quick
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import process


def test_its_learner_is_a_module_that_takes_the_place_of_the_real_one() -> None:
    (module,) = quick(LearnerConfig())
    assert importlib.util.find_spec(module) is not None
    assert callable(vars(process)["_command"])
