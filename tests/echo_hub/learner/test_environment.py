import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.environment import environment


def test_waiting_threads_leave_their_core_to_others_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment(LearnerConfig())["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment(LearnerConfig())["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_number_of_threads_is_left_to_pytorch_unless_it_is_set() -> None:
    assert "OMP_NUM_THREADS" not in environment(LearnerConfig())
    assert environment(LearnerConfig(threads=3))["OMP_NUM_THREADS"] == "3"
