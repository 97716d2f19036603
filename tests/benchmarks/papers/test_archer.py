from __future__ import annotations

import pytest

from benchmarks.papers.archer import BY, TURN_CREDIT
from tests.benchmarks.papers.toy import ran


def test_the_gain_is_that_of_the_mean_reward_over_all_steps() -> None:
    better = ran(0.5, 0.5)
    better.steps[0] = {**better.steps[0], "mean_reward": 0.7}
    found = {BY["episode"]: [ran(0.5, 0.5)], BY["turn"]: [better]}
    assert TURN_CREDIT.headline(found) == {"turn_credit_gain": pytest.approx(0.1)}
    assert [row["mean_reward"] for row in TURN_CREDIT.rows(found)] == [0.5, pytest.approx(0.6)]
    assert BY["turn"].config(0).training.credit == "turn"
