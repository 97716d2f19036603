from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.cispo import Cispo

RATIOS, ADVANTAGES = [1.0, 3.0, 9.0, 0.5, 9.0], [2.0, 1.0, 1.0, -1.0, -1.0]


def test_loss_and_gradient_by_hand(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    tokens = make_tokens(RATIOS, ADVANTAGES)
    result = Cispo(cap=5.0).losses(tokens)
    weighted = torch.tensor([2.0, 3.0, 5.0, -0.5, -5.0], dtype=torch.float64)
    torch.testing.assert_close(result.losses_N, -weighted * tokens.learner_logprobs_N)
    assert result.clipped_N.tolist() == [False, False, True, False, True]
    assert gradient(Cispo(cap=5.0), tokens) == pytest.approx((-weighted).tolist()), "no gradient through the ratio"


def test_gradient_equals_the_surrogates_by_finite_differences(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    """Loss -A min(r, cap) log π, with advantage A and the probability ratio r taken as a constant, has the gradient of
    -A F with dF / d log r = min(r, cap): F is r below the cap, and cap (1 + log r - log cap) above.
    """
    cap, step = torch.tensor(5.0, dtype=torch.float64), 1e-6
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)

    def surrogate(log_ratio: torch.Tensor) -> torch.Tensor:
        return -advantages * torch.where(log_ratio < cap.log(), log_ratio.exp(), cap * (1 + log_ratio - cap.log()))

    logs = torch.tensor(RATIOS, dtype=torch.float64).log()
    difference = (surrogate(logs + step) - surrogate(logs - step)) / (2 * step)
    assert gradient(Cispo(cap=5.0), make_tokens(RATIOS, ADVANTAGES)) == pytest.approx(difference.tolist(), abs=1e-7)


def test_the_ratio_is_taken_against_the_old_policy(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    tokens = make_tokens([3.0], [1.0], proximal=[2.0], old="proximal")
    expected = -1.5 * tokens.learner_logprobs_N
    torch.testing.assert_close(Cispo(cap=5.0).losses(tokens).losses_N, expected)
