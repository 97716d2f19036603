from __future__ import annotations

import pytest

from benchmarks.papers import batches
from tests.benchmarks.papers.toy import ran


def test_the_step_ratio_of_a_run_that_misses_the_goal_is_none() -> None:
    found = {batches.SHUFFLE_GRPO: [ran(0.4, 0.8)], batches.SHUFFLED: [ran(0.6, 1.0)]}
    assert batches.SHUFFLE_R1.headline(found) == {"shuffle_steps_ratio": pytest.approx(0.5)}
    never = found | {batches.SHUFFLED: [ran(0.4, 0.5)]}
    assert batches.SHUFFLE_R1.headline(never)["shuffle_steps_ratio"] is None


def test_a_gradients_variance_is_relative_to_its_mean() -> None:
    assert batches.variance([ran(0.5, norms=(1.0, 3.0))]) == pytest.approx(0.25)
    assert batches.variance([ran(0.5, norms=(10.0, 30.0))]) == pytest.approx(0.25)
