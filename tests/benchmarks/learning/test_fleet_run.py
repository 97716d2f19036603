from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learning import cases, fleet_run, recording
from benchmarks.learning.fleet_run import TRAINED, Fate, FleetFigures


def test_a_bias_compares_trained_with_requested_rollouts() -> None:
    fates = [
        Fate(outcome=TRAINED, rollouts=30, tokens=10.0, reward=0.5),
        Fate(outcome="stale", rollouts=10, tokens=30.0, reward=0.1),
    ]
    figures = FleetFigures(
        points=[], fates=fates, asked_tokens=12.0, asked_reward=0.45, shortest=1, longest=30, utilisation=1.0
    )
    assert figures.length_bias == pytest.approx(1 - 10 / 12)
    assert figures.reward_bias == pytest.approx(0.05)
    assert figures.lost_share == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_every_rollout_of_a_fleet_of_unequal_engines_has_a_fate() -> None:
    case = replace(cases.BY_STALENESS[1], steps=6, groups_per_step=4, group_size=4, problems=16)
    figures = fleet_run.run(case.config(0), recording.load())
    trained = next(fate for fate in figures.fates if fate.outcome == TRAINED)
    assert trained.rollouts == 6 * 16 and 1 <= trained.tokens <= 6 and 0 <= trained.reward <= 1
    assert figures.points[-1].trained_rollouts == 6 * 16 and 0 < figures.utilisation <= 1
