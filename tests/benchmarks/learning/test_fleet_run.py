from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.site import merged
from benchmarks.learning import cases, fleet_run
from benchmarks.learning.fleet_run import FleetLearning, recorded_nodes
from benchmarks.learning.virtual_run import Point


def test_a_bias_compares_trained_with_requested_rollouts() -> None:
    learning = FleetLearning.__new__(FleetLearning)
    learning.points = [Point(trained_rollouts=0, reward=None, accuracy=0.5, staleness=0.0)]
    learning.places = {"a": (1, 0), "b": (1, 0), "c": (1, 1)}
    learning.tokens = {"a": 30, "b": 10, "c": 10}
    learning.earned = {"a": 0.0, "b": 1.0, "c": 0.0}
    learning.is_trained = {"a": False, "b": True, "c": True}
    figures = learning.figures(utilisation=1.0)
    assert figures.length_bias == pytest.approx(1 - 10 / 15), "the first place was requested twice"
    assert figures.reward_bias == pytest.approx(0.5 - 0.25)
    assert figures.lost_share == pytest.approx(30 / 50)


def test_the_recorded_machines_are_unequal() -> None:
    means = [node.traits.s_per_token for node in recorded_nodes()]
    assert len(means) == 6 and max(means) > 5 * min(means) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_fleet_of_unequal_engines_trains_every_step() -> None:
    small = {"training": {"steps": 6, "groups_per_step": 4, "group_size": 4}, "evaluation": {"problems": 16}}
    case = replace(cases.BY_STALENESS[1], settings=merged(cases.BY_STALENESS[1].settings, small))
    figures = fleet_run.run(case.config(0), recorded_nodes())
    assert figures.trained_rollouts == 6 * 16 and 0 <= figures.lost_share < 1 and 0 < figures.utilisation <= 1
