from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.gspo import Gspo

WIDE = Gspo(clip_low=0.2, clip_high=0.3)


def test_loss_by_hand(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    # The ratio s of a rollout is a geometric mean: sqrt(0.8 * 1.25) = 1, sqrt(4 * 1) = 2, and 0.25.
    tokens = make_tokens([0.8, 1.25, 4.0, 1.0, 0.25], [1.0, 1.0, 2.0, 2.0, -1.0], rollouts=[0, 0, 1, 1, 2])
    result = WIDE.losses(tokens)
    assert result.losses_N.tolist() == pytest.approx([-1, -1, -2.6, -2.6, 0.8])
    assert result.clipped_N.tolist() == [False, False, True, True, True]


def test_its_published_range_is_narrow(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    tokens = make_tokens([1.0005, 1.0003, 0.9996, 0.9998], [1.0, 1.0, -1.0, -1.0])
    assert Gspo(clip_low=3e-4, clip_high=4e-4).losses(tokens).clipped_N.tolist() == [True, False, True, False]


def test_gradient_by_finite_differences(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    """Finite differences can check only the gradient of the sum of a rollout's losses, because its tokens share the
    ratio s.
    """
    start = torch.tensor([0.8, 1.3, 4.0, 1.0, 0.9], dtype=torch.float64).log().requires_grad_()

    def loss(logs: torch.Tensor) -> torch.Tensor:
        tokens = make_tokens(logs.exp(), [1.0, 1.0, 2.0, 2.0, -1.0], rollouts=[0, 0, 1, 1, 2])
        return WIDE.losses(tokens).losses_N.sum()

    assert torch.autograd.gradcheck(loss, (start,), eps=1e-6, atol=1e-7)


def test_a_tokens_loss_has_a_gradient_only_by_itself(make_tokens: Callable[..., ObjectiveTokens]) -> None:
    tokens = make_tokens([0.8, 1.25, 1.0], [1.0, 1.0, 1.0], rollouts=[0, 0, 0])
    (values,) = torch.autograd.grad(WIDE.losses(tokens).losses_N[1], tokens.learner_logprobs_N)
    assert values.tolist() == pytest.approx([0, -1, 0])


def test_a_rollout_without_tokens_and_a_batch_of_none() -> None:
    none = torch.zeros(0, requires_grad=True)
    tokens = ObjectiveTokens(
        learner_logprobs_N=none,
        old_logprobs_N=none.detach(),
        proximal_logprobs_N=none.detach(),
        behavior_logprobs_N=none.detach(),
        advantages_N=none.detach(),
        rollouts_N=torch.zeros(0, dtype=torch.int64),
        lengths=(0,),
    )
    assert WIDE.losses(tokens).losses_N.shape == (0,)


def test_every_token_of_a_rollout_has_the_same_gradient(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    # A rollout of T tokens has the loss T s A in total, and each token's log-probability changes s by s / T.
    tokens = make_tokens([0.8, 1.25], [1.0, 1.0], rollouts=[0, 0])
    assert gradient(WIDE, tokens) == pytest.approx([-1, -1])


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=6))
def test_the_order_of_tokens_does_not_count(ratios: list[float]) -> None:
    def losses(values: list[float]) -> torch.Tensor:
        logs = torch.tensor(values, dtype=torch.float64).log()
        zeros = torch.zeros_like(logs)
        tokens = ObjectiveTokens(
            learner_logprobs_N=logs,
            old_logprobs_N=zeros,
            proximal_logprobs_N=zeros,
            behavior_logprobs_N=zeros,
            advantages_N=torch.ones_like(logs),
            rollouts_N=torch.zeros(len(values), dtype=torch.int64),
            lengths=(len(values),),
        )
        return WIDE.losses(tokens).losses_N

    torch.testing.assert_close(losses(ratios), losses(sorted(ratios)))
