from __future__ import annotations

import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import machine
from echo_hub.learner.machine import computing_precision, machine_digest


def test_the_digest_is_the_same_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_digest("cpu")
    assert machine_digest("cpu") == here and len(here) == 16
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine_digest("cpu") != here
    monkeypatch.undo()
    assert machine_digest("cpu") == here
    monkeypatch.setattr(machine.metadata, "version", lambda name: "another")
    assert machine_digest("cpu") != here


def test_the_precision_that_auto_stands_for() -> None:
    assert computing_precision(LearnerConfig(device="cpu")) == "float32"
    assert computing_precision(LearnerConfig(device="cpu", precision="bfloat16")) == "bfloat16"
