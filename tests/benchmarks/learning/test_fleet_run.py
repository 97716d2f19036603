from __future__ import annotations

import pytest

from benchmarks.learning.fleet_run import FleetLearning
from benchmarks.learning.virtual_run import Point


def test_a_bias_compares_trained_with_requested_rollouts() -> None:
    learning = FleetLearning.__new__(FleetLearning)
    learning.points = [Point(trained_rollouts=0, reward=None, accuracy=0.5, staleness=0.0)]
    learning.places = {"a": (1, 0), "b": (1, 0), "c": (1, 1)}
    learning.tokens = {"a": 30, "b": 10, "c": 10}
    learning.earned = {"a": 0.0, "b": 1.0, "c": 0.0}
    learning.is_trained = {"a": False, "b": True, "c": True}
    figures = learning.figures(utilisation=1.0)
    assert figures["length_bias"] == pytest.approx(1 - 10 / 15), "the first place was requested twice"
    assert figures["reward_bias"] == pytest.approx(0.5 - 0.25)
    assert figures["lost_share"] == pytest.approx(30 / 50)
