from __future__ import annotations

import random

import pytest

from echo_hub.operation.reward_trend import WINDOW, RewardTrend


def trend(*rewards: float) -> RewardTrend:
    made = RewardTrend()
    for step, reward in enumerate(rewards, start=1):
        made.add(step, reward)
    return made


def noisy(mean: float, count: int, seed: int, spread: float = 0.05) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


def rising(count: int) -> list[float]:
    return [0.2 + 0.6 * step / count for step in range(count)]


def test_a_run_that_collapses_has_fallen_and_says_from_where() -> None:
    made = trend(*rising(100), *noisy(0.25, WINDOW, 1))
    fall = made.fall(has_fallen=False)
    assert fall is not None and fall.best > 0.7 and fall.now < 0.35 and 99 <= fall.best_step <= 104


@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_random_rewards_are_no_fall(gain: float) -> None:
    """The rewards are 2,000 steps of noise, around a constant mean or after a gain. At no step may an alert of falling
    rewards come."""
    fell = 0
    for seed in range(100):
        made, has_fallen = RewardTrend(), False
        start = [reward * gain for reward in rising(50)] if gain else []
        for step, reward in enumerate([*start, *noisy(0.8 * gain, 2_000, seed, 0.1)], start=1):
            made.add(step, reward)
            has_fallen |= made.fall(has_fallen=False) is not None
        fell += has_fallen
    assert fell == 0


def test_a_small_part_of_the_gain_lost_is_no_fall() -> None:
    assert trend(*rising(100), *noisy(0.7, WINDOW, 2, 0.001)).fall(has_fallen=False) is None


def test_a_fall_ends_when_half_of_it_is_regained() -> None:
    down = [*rising(100), *noisy(0.3, WINDOW, 3, 0.01)]
    made = trend(*down, *noisy(0.58, WINDOW, 4, 0.01))
    assert made.fall(has_fallen=False) is None and made.fall(has_fallen=True) is not None
    made = trend(*down, *noisy(0.72, WINDOW, 5, 0.01))
    assert made.fall(has_fallen=True) is None


def test_nothing_is_reported_before_a_window_is_full() -> None:
    assert trend(*[1.0] * (WINDOW - 1)).fall(has_fallen=False) is None
    assert RewardTrend().fall(has_fallen=False) is None


def test_a_run_that_starts_at_its_best_can_fall() -> None:
    assert trend(*noisy(0.9, 40, 6), *noisy(0.1, WINDOW, 7)).fall(has_fallen=False) is not None
