import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner.schedule import share_of_highest


def shares(**settings: object) -> list[float]:
    training = TrainingConfig.model_validate(settings)
    return [share_of_highest(training, step) for step in range(1, training.steps + 1)]


def test_the_default_schedule_is_constant() -> None:
    assert shares(steps=5) == [1.0] * 5


def test_the_rate_rises_linearly_in_the_warm_up() -> None:
    assert shares(steps=6, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_steps_before_the_schedule_do_not_count() -> None:
    whole = TrainingConfig(steps=5, warmup_steps=1, schedule="cosine")
    shifted = TrainingConfig(steps=7, warmup_steps=1, schedule="cosine")
    for step in range(1, 6):
        assert share_of_highest(shifted, step + 2, steps_before=2) == share_of_highest(whole, step)


def test_a_linear_schedule_falls_to_its_final_share() -> None:
    assert shares(steps=5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert shares(steps=6, schedule="linear", warmup_steps=1, final_share=0.5) == pytest.approx(
        [0.5, 1.0, 0.9, 0.8, 0.7, 0.6]
    )


def test_a_cosine_schedule_falls_by_half_a_cosine() -> None:
    expected = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert shares(steps=4, schedule="cosine") == pytest.approx(expected)
    assert shares(steps=4, schedule="cosine", final_share=0.2) == pytest.approx([0.2 + 0.8 * one for one in expected])


@given(
    st.integers(1, 40),
    st.integers(0, 60),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
    st.integers(1, 200),
)
def test_every_step_has_a_share_above_zero_and_at_most_one(
    steps: int, warmup: int, schedule: str, final: float, step: int
) -> None:
    """A run that was shortened repeats steps beyond its last one; only there may the share be 0."""
    training = TrainingConfig.model_validate(
        {"steps": steps, "warmup_steps": warmup, "schedule": schedule, "final_share": final}
    )
    share = share_of_highest(training, step)
    assert 0 <= share <= 1
    assert share > 0 or step > steps
