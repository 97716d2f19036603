from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.grpo import Grpo

GRPO = Grpo(clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # Clipped: beyond a ratio of 1 + ε, a good token earns no more.
        (0.5, 2.0, -1.0),  # Not clipped: the smaller of the clipped and the plain value counts.
        (1.5, -2.0, 3.0),
        (0.5, -2.0, 1.6),
    ],
)
def test_loss_by_hand(make_tokens: Callable[..., ObjectiveTokens], ratio: float, advantage: float, loss: float) -> None:
    assert GRPO.losses(make_tokens([ratio], [advantage])).losses_N.tolist() == pytest.approx([loss])


def test_gradient_by_finite_differences(check_gradient: Callable[..., None]) -> None:
    check_gradient(GRPO, [1.05, 0.45, 1.82, 0.95, 0.74], [0.7, -0.3, 0.5, -1.0, 0.0])
    check_gradient(GRPO, [1.05, 0.45, 1.82], [0.7, -0.3, 0.5], proximal=[1.1, 0.5, 1.0], old="proximal")


def test_clipped_tokens_and_tokens_without_advantage_have_zero_gradient(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    tokens = make_tokens([1.5, 0.5, 1.5, 0.5, 1.1], [1.0, -1.0, -1.0, 1.0, 0.0])
    assert gradient(GRPO, tokens) == pytest.approx([0, 0, 1.5, -0.5, 0])
    assert GRPO.losses(tokens).clipped_N.tolist() == [True, True, False, False, False]


def test_against_the_proximal_policy_the_behavior_policy_does_not_count(
    make_tokens: Callable[..., ObjectiveTokens],
) -> None:
    tokens = make_tokens([3.0], [1.0], proximal=[2.7], old="proximal")
    assert GRPO.losses(tokens).losses_N.item() == pytest.approx(-3 / 2.7)
