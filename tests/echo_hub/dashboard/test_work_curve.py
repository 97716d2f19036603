from __future__ import annotations

import pytest

from echo_hub.dashboard.work_curve import work_curve
from echo_shared.records.credit import StepShare

POINTS = [{"step": 2.0, "mean_reward": 0.25}, {"step": 4.0, "mean_reward": None}, {"step": 5.0, "mean_reward": 0.75}]


def test_a_nodes_shares_are_paired_with_the_steps_rewards() -> None:
    curve = work_curve(2, POINTS, {0: StepShare(rollouts=4, share=0.5), 2: StepShare(rollouts=1, share=0.25)})
    assert [(p.step, p.rollouts, p.share) for p in curve.points] == [(2, 4, 0.5), (4, 0, 0.0), (5, 1, 0.25)]
    assert curve.reward_line(100, 10) == [(0.0, 10.0), (100.0, 0.0)]
    assert curve.bars(90, 10) == [pytest.approx((0.0, 30.0, 5.0)), pytest.approx((60.0, 30.0, 2.5))]
    assert curve.svg_line == "0.0,200.0 1000.0,0.0" and not curve.is_empty


def test_without_data_nothing_is_drawn() -> None:
    for curve in (work_curve(1, [], {}), work_curve(1, [{"step": 1.0, "mean_reward": 0.5}], {})):
        assert curve.is_empty and curve.bars() == []
    assert work_curve(1, [{"step": 1.0, "mean_reward": 0.5}], {}).svg_line == "0.0,200.0"
