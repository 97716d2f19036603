from __future__ import annotations

from collections.abc import Callable

import pytest

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.decoupled_ppo import DecoupledPpo

DECOUPLED = DecoupledPpo(clip_low=0.2, clip_high=0.2, cap=5.0)


@pytest.mark.parametrize(
    ("learner", "proximal", "advantage", "loss", "clipped"),
    [
        (2.0, 2.0, 1.0, -2.0, False),  # u (learner over proximal policy) is 1, w (proximal over behaviour policy) is 2.
        (2.2, 2.0, 1.0, -2.2, False),  # Inside the clip range, u w A is the learner's ratio times A.
        (3.0, 2.0, 1.0, -2.4, True),  # u = 1.5 is clipped to 1.2.
        (3.0, 2.0, -1.0, 3.0, False),
        (0.5, 1.0, -1.0, 0.8, True),
        (6.0, 6.0, 1.0, 0.0, True),  # w exceeds its cap, so the token is left out.
    ],
)
def test_loss_by_hand(
    make_tokens: Callable[..., ObjectiveTokens],
    learner: float,
    proximal: float,
    advantage: float,
    loss: float,
    clipped: bool,
) -> None:
    result = DECOUPLED.losses(make_tokens([learner], [advantage], proximal=[proximal]))
    assert result.losses_N.tolist() == pytest.approx([loss])
    assert result.clipped_N.tolist() == [clipped]


def test_gradient_by_finite_differences(check_gradient: Callable[..., None]) -> None:
    check_gradient(
        DECOUPLED, [2.2, 3.0, 3.0, 0.5, 6.0], [1.0, 1.0, -1.0, -1.0, 1.0], proximal=[2.0, 2.0, 2.0, 1.0, 6.0]
    )


def test_at_a_steps_start_it_equals_a_capped_policy_gradient(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    assert gradient(DECOUPLED, make_tokens([0.5, 3.0, 7.0], [1.0, -1.0, 1.0])) == pytest.approx([-0.5, 3.0, 0.0])
