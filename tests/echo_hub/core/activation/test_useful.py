"""Time per step in which a node's rollouts are still fresh enough, by the provisioning rule."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from echo_hub.core.activation.useful import Demand


@pytest.mark.parametrize(
    ("late_s", "staleness", "every", "expected"),
    [
        (3.0, 1, 1, 7.0),  # A step of 10 s less the version's broadcast and one rollout.
        (3.0, 2, 1, 10.0),  # At most until the next version, 10 s later.
        (12.0, 1, 1, 0.0),
        (25.0, 4, 3, 5.0),  # 15 s are useful of each version, and a version lasts three steps.
    ],
)
def test_useful_time_is_when_a_nodes_rollouts_can_be_used(
    late_s: float, staleness: int, every: int, expected: float
) -> None:
    demand = Demand(rollouts_per_step=8, step_s=10.0, max_staleness=staleness, publish_every=every)
    assert demand.useful_of(1.0, late_s) == pytest.approx(expected)
    assert demand.useful(np.array([1.0, 2.0]), np.array([late_s, late_s])) == pytest.approx([expected, 2 * expected])
    assert demand.need == 8


def test_without_staleness_no_number_of_nodes_is_enough() -> None:
    demand = Demand(rollouts_per_step=8, step_s=10.0, max_staleness=0, publish_every=1)
    assert demand.need == inf and demand.useful_of(2.0, 99.0) == 20.0
