from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from echo_hub.learner import grpo


def test_advantage_is_reward_minus_group_mean_without_deviation() -> None:
    np.testing.assert_allclose(grpo.group_advantages(np.array([1.0, 0.0, 0.0, 3.0])), [0.0, -1.0, -1.0, 2.0])


def test_equal_rewards_have_exactly_no_advantage() -> None:
    # 0.1 summed seven times and divided by seven is not 0.1 in floating point.
    assert not grpo.group_advantages(np.full(7, 0.1)).any()


def losses_of(ratios: list[float], advantages: list[float]) -> list[float]:
    log_ratio = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)
    values = torch.tensor(advantages, dtype=torch.float64)
    result: list[float] = grpo.clipped_losses(log_ratio, values, clip_epsilon=0.2).tolist()
    return result


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # clipped: no more credit above 1 + ε
        (0.5, 2.0, -1.0),  # not clipped: the smaller of the two counts
        (1.5, -2.0, 3.0),
        (0.5, -2.0, 1.6),
    ],
)
def test_loss_by_hand(ratio: float, advantage: float, loss: float) -> None:
    assert losses_of([ratio], [advantage]) == pytest.approx([loss])


def test_gradient_of_the_loss_by_finite_differences() -> None:
    # Away from the kinks of min and clip.
    learner = torch.tensor([-1.0, -2.0, -0.4, -3.0, -1.3], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-1.05, -1.2, -1.0, -2.95, -1.0], dtype=torch.float64)
    advantages = torch.tensor([0.7, -0.3, 0.5, -1.0, 0.0], dtype=torch.float64)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        log_ratio = grpo.log_importance_ratio(logprobs, behavior)
        return grpo.clipped_losses(log_ratio, advantages, clip_epsilon=0.2).sum()

    assert torch.autograd.gradcheck(loss, (learner,), eps=1e-6, atol=1e-7)


def test_clipped_tokens_and_tokens_without_advantage_have_zero_gradient() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    log_ratio = ratios.log().requires_grad_()
    grpo.clipped_losses(log_ratio, advantages, clip_epsilon=0.2).sum().backward()
    assert log_ratio.grad is not None
    assert (log_ratio.grad == 0).tolist() == [True, True, False, False, True]
    assert grpo.is_clipped(log_ratio, advantages, clip_epsilon=0.2).tolist() == [True, True, False, False, False]


def test_mismatch_kl_by_hand_and_in_the_mean() -> None:
    assert grpo.mismatch_kl(torch.tensor([0.0])).item() == 0.0
    assert grpo.mismatch_kl(torch.tensor([math.log(2.0)])).item() == pytest.approx(1 - math.log(2))
    behavior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    learner = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expected = (behavior * (behavior.log() - learner.log())).sum()
    estimate = (behavior * grpo.mismatch_kl(learner.log() - behavior.log())).sum()
    assert estimate.item() == pytest.approx(expected.item())


def test_an_impossible_token_does_not_overflow() -> None:
    log_ratio = grpo.log_importance_ratio(torch.tensor([-1.0]), torch.tensor([-400.0]))
    loss = grpo.clipped_losses(log_ratio, torch.tensor([-1.0]), clip_epsilon=0.2)
    assert torch.isfinite(loss).all()
