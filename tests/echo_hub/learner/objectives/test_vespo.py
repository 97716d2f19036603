from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.objectives.base import Objective, ObjectiveTokens
from echo_hub.learner.objectives.vespo import Vespo

VESPO = Vespo()


def phi(w: float, k: float, rate: float) -> float:
    """Return the paper's weight φ(w), normalised so that φ(1) = 1."""
    return math.exp(rate) * w**k * math.exp(-rate * w)


def test_loss_and_gradient_by_hand(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    """Tokens of a rollout share one weight. Rollout 0 has two tokens; rollouts 1 and 2 have one token each, rollout 2
    with ratio 1.
    """
    tokens = make_tokens([0.5, 1.5, 1.3, 1.0], [1.0, 1.0, -2.0, 3.0], rollouts=[0, 0, 1, 2])
    weights = [phi(0.75, 2, 3), phi(0.75, 2, 3), phi(1.3, 3, 2), 1.0]
    expected = [-weight * advantage for weight, advantage in zip(weights, [1.0, 1.0, -2.0, 3.0], strict=True)]
    assert gradient(VESPO, tokens) == pytest.approx(expected), "the weight itself has no gradient"
    result = VESPO.losses(tokens)
    logs = tokens.learner_logprobs_N.tolist()
    assert result.losses_N.tolist() == pytest.approx([of * log for of, log in zip(expected, logs, strict=True)])
    assert not result.clipped_N.any()


def test_a_turns_advantage_decides_its_own_tokens(
    make_tokens: Callable[..., ObjectiveTokens], gradient: Callable[[Objective, ObjectiveTokens], list[float]]
) -> None:
    tokens = make_tokens([0.5, 1.5], [1.0, -1.0], rollouts=[0, 0])
    assert gradient(VESPO, tokens) == pytest.approx([-phi(0.75, 2, 3), phi(0.75, 3, 2)])


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=4), st.sampled_from([-1.0, 1.0]))
def test_no_claim_makes_a_rollout_outweigh_a_step(log_ratios: list[float], advantage: float) -> None:
    count = len(log_ratios)
    learner, zero = torch.tensor(log_ratios, requires_grad=True), torch.zeros(count)
    tokens = ObjectiveTokens(
        learner_logprobs_N=learner,
        old_logprobs_N=zero,
        proximal_logprobs_N=zero,
        behavior_logprobs_N=zero,
        advantages_N=torch.full((count,), advantage),
        rollouts_N=torch.zeros(count, dtype=torch.int64),
        lengths=(count,),
    )
    losses = VESPO.losses(tokens).losses_N
    (found,) = torch.autograd.grad(losses.sum(), learner)
    assert losses.isfinite().all() and float(found.abs().max()) < 1.25
