from __future__ import annotations

import pytest
from reasoning_gym.factory import DATASETS

from echo_hub.tasks.free_rewards import PAID_FOR_NOTHING, warning_of
from scripts.free_rewards import free


def test_the_figures_are_of_existing_datasets() -> None:
    assert PAID_FOR_NOTHING.keys() <= DATASETS.keys()
    assert all(0.01 <= paid <= 1 for paid in PAID_FOR_NOTHING.values())


@pytest.mark.parametrize("dataset", ["propositional_logic", "chain_sum", "knights_knaves"])
def test_the_listed_figures_equal_measured_ones(dataset: str) -> None:
    assert max(free(dataset).values()) == pytest.approx(PAID_FOR_NOTHING.get(dataset, 0.0), abs=0.0099)


def test_choosing_such_a_task_gives_a_warning() -> None:
    warning = warning_of("reasoning-gym:propositional_logic")
    assert warning is not None and "try-task reasoning-gym:propositional_logic" in warning
    assert warning_of("reasoning-gym:chain_sum") is None
    assert warning_of("arithmetic") is None
