from __future__ import annotations

import pytest
import torch

from scripts.small_base.muon import MOMENTUM, Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_all_directions_of_a_matrix_become_about_as_long(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, shape[1])
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert orthogonal(matrix).shape == shape and values.min() > 0.6 and values.max() < 1.3


def test_a_step_goes_down_and_takes_the_gradient() -> None:
    target = torch.randn((4, 6), generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    muon = Muon([weight], weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (weight - target).square().sum()
        loss.backward()
        losses.append(loss.item())
        muon.step(0.1)
        assert weight.grad is None
    assert losses[-1] < 0.1 * losses[0] and MOMENTUM == 0.95
    before = weight.detach().clone()
    muon.step(0.1)
    assert torch.equal(weight, before), "without a gradient, the weight stays"
