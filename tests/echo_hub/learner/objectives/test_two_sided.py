from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.two_sided import TwoSided

TWO_SIDED = TwoSided(clip_low=0.2, clip_high=0.2, cap=4.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 1.0, -1.1, False),
        (1.5, 1.0, -1.2, True),
        (9.0, 1.0, -1.2, True),
        (0.5, 1.0, -0.5, False),
        (3.0, -1.0, 3.0, False),
        (9.0, -1.0, 4.0, True),  # GRPO's loss would be 9 here: it does not bound the ratio of bad tokens.
        (0.5, -1.0, 0.8, True),
    ],
)
def test_loss_by_hand(
    make_tokens: Callable[..., ObjectiveTokens], ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    result = TWO_SIDED.losses(make_tokens([ratio], [advantage]))
    assert result.losses_N.tolist() == pytest.approx([loss])
    assert result.clipped_N.tolist() == [clipped]


def test_gradient_by_finite_differences(
    make_tokens: Callable[..., ObjectiveTokens],
    check_gradient: Callable[..., None],
    gradient: Callable[[Objective, ObjectiveTokens], list[float]],
) -> None:
    ratios, advantages = [1.1, 1.5, 3.0, 9.0, 0.5], [1.0, 1.0, -1.0, -1.0, -1.0]
    check_gradient(TWO_SIDED, ratios, advantages)
    assert gradient(TWO_SIDED, make_tokens(ratios, advantages)) == pytest.approx([-1.1, 0, 3.0, 0, 0])


@given(st.floats(1e-3, 1e3), st.floats(-3, 3))
def test_the_loss_is_bounded(ratio: float, advantage: float) -> None:
    value = torch.tensor([ratio], dtype=torch.float64).log()
    zero = torch.zeros_like(value)
    tokens = ObjectiveTokens(
        learner_logprobs_N=value,
        old_logprobs_N=zero,
        proximal_logprobs_N=zero,
        behavior_logprobs_N=zero,
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        rollouts_N=torch.zeros(1, dtype=torch.int64),
        lengths=(1,),
    )
    assert TWO_SIDED.losses(tokens).losses_N.abs().item() <= 4 * abs(advantage) + 1e-9
    written_out = -min(min(ratio, 4) * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert TWO_SIDED.losses(tokens).losses_N.item() == pytest.approx(written_out)
