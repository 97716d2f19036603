import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.environment import SPINS, environment


def test_waiting_threads_soon_leave_their_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert environment(LearnerConfig())["GOMP_SPINCOUNT"] == str(SPINS)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment(LearnerConfig())["GOMP_SPINCOUNT"] == "7", "the operator's choice"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in environment(LearnerConfig()), "it would precede the policy"


def test_the_number_of_threads_is_left_to_pytorch_unless_it_is_set() -> None:
    assert "OMP_NUM_THREADS" not in environment(LearnerConfig())
    assert environment(LearnerConfig(threads=3))["OMP_NUM_THREADS"] == "3"
