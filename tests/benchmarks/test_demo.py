from __future__ import annotations

import pytest

from benchmarks.demo import utilisation


def test_utilisation_is_the_share_of_the_time_in_which_a_step_trains() -> None:
    steps = [{"train_s": 2.0}, {"train_s": 3.0, "gap_s": 1.0}, {"train_s": 4.0, "gap_s": 2.0}]
    assert utilisation(steps) == 9 / 12
    with pytest.raises(KeyError, match="gap_s"):
        utilisation([*steps, {"train_s": 1.0}])
