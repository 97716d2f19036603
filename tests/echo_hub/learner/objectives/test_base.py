from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.learner.objectives.base import clipped_losses, k3, ratio


@given(st.floats(-1e4, 0), st.floats(-1e4, 0))
def test_no_ratio_overflows(numerator: float, denominator: float) -> None:
    value = ratio(torch.tensor([numerator]), torch.tensor([denominator]))
    assert torch.isfinite(value).all() and (value >= 0).all()


@given(st.floats(-400, 400), st.sampled_from([3.0, 20.0]))
def test_divergences_and_their_gradients_are_finite(log_ratio: float, bound: float) -> None:
    logs = torch.tensor([log_ratio], requires_grad=True)
    value = k3(logs, bound=bound)
    (gradient,) = torch.autograd.grad(value.sum(), logs)
    assert torch.isfinite(value) and value >= 0
    assert gradient.item() == pytest.approx(math.expm1(min(log_ratio, bound)), rel=1e-4, abs=1e-6)


def test_beyond_its_bound_k3_is_a_straight_line() -> None:
    values = k3(torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64), bound=2.0).tolist()
    assert values == pytest.approx([math.exp(2) - 3 + 2 * number * (math.exp(2) - 1) for number in range(3)])


def test_k3_near_zero_is_half_the_square() -> None:
    logs = torch.tensor([-1e-3, 1e-3, 1e-5])
    torch.testing.assert_close(k3(logs), logs**2 / 2, rtol=1e-2, atol=0)


def test_k3_by_hand_and_in_the_mean() -> None:
    assert k3(torch.tensor([0.0])).item() == 0.0
    assert k3(torch.tensor([2.0]).log()).item() == pytest.approx(1 - math.log(2))
    sampled = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    other = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expected = (sampled * (sampled / other).log()).sum()
    assert (sampled * k3((other / sampled).log())).sum().item() == pytest.approx(expected.item())


@given(st.floats(0, 1e3), st.floats(-10, 10), st.floats(0, 0.99), st.floats(0, 5))
def test_clipping_never_promises_more_than_the_ratio(r: float, advantage: float, low: float, high: float) -> None:
    tensors = torch.tensor([r], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    result = clipped_losses(*tensors, low=low, high=high)
    assert -result.losses_N.item() <= r * advantage + 1e-9
    if 1 - low <= r <= 1 + high:
        assert not result.clipped_N and -result.losses_N.item() == pytest.approx(r * advantage)


def test_a_likely_token_of_an_impossible_sampler_does_not_overflow() -> None:
    ratio_N = ratio(torch.tensor([-1.0]), torch.tensor([-400.0]))
    assert torch.isfinite(clipped_losses(ratio_N, torch.tensor([-1.0]), low=0.2, high=0.2).losses_N).all()
