from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.sapo import Sapo

SAPO = Sapo()


def gate(ratio: float, temperature: float) -> float:
    return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "temperature"), [(1.0, 3.0, 1.0), (2.5, 1.0, 1.0), (0.2, 1.0, 1.0), (1.7, -1.5, 1.05)]
)
def test_loss_by_hand(
    make_tokens: Callable[..., ObjectiveTokens], ratio: float, advantage: float, temperature: float
) -> None:
    result = SAPO.losses(make_tokens([ratio], [advantage]))
    assert result.losses_N.tolist() == pytest.approx([-gate(ratio, temperature) * advantage])
    assert result.clipped_N.tolist() == [False]


def test_gradient_by_finite_differences_and_by_the_papers_weight(
    make_tokens: Callable[..., ObjectiveTokens],
    check_gradient: Callable[..., None],
    gradient: Callable[[Objective, ObjectiveTokens], list[float]],
) -> None:
    ratios, advantages = [1.0, 2.5, 0.2, 1.0, 1.7, 9.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    check_gradient(SAPO, ratios, advantages)
    expected = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        share = gate(ratio, 1.0 if advantage > 0 else 1.05) * (1.0 if advantage > 0 else 1.05) / 4
        expected.append(-4 * share * (1 - share) * ratio * advantage)
    assert gradient(SAPO, make_tokens(ratios, advantages)) == pytest.approx(expected)
    assert expected[0] == -1 and expected[3] == 1, "without movement, the gradient is that without a gate"


@given(st.floats(-60, 60), st.sampled_from([-1.0, 1.0]))
def test_no_claim_makes_a_token_outweigh_a_step(log_ratio: float, advantage: float) -> None:
    value = torch.tensor([log_ratio], requires_grad=True)
    zero = torch.zeros(1)
    tokens = ObjectiveTokens(
        learner_logprobs_N=value,
        old_logprobs_N=zero,
        proximal_logprobs_N=zero,
        behavior_logprobs_N=zero,
        advantages_N=torch.tensor([advantage]),
        rollouts_N=torch.zeros(1, dtype=torch.int64),
        lengths=(1,),
    )
    losses = SAPO.losses(tokens).losses_N
    (found,) = torch.autograd.grad(losses.sum(), value)
    assert losses.isfinite().all() and abs(found.item()) < 1.6
