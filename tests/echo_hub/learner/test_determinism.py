from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from echo_hub.learner.determinism import backward, choose
from echo_shared.errors import LearnerError

modes: list[tuple[bool, bool]] = []


def mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


class _Notes(Function):
    """A function that records the mode of its backward pass, and does an operation whose result depends on thread
    order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, puts: bool) -> Tensor:
        ctx.puts = puts
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        modes.append(mode())
        if ctx.puts:
            gradients[0].clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return gradients[0] * 2, None


def computed(*, puts: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.ones(3, requires_grad=True)
    return x, _Notes.apply(x, puts).sum()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _mode_as_before() -> Iterator[None]:
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    modes.clear()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_the_backward_pass_alone_is_strict() -> None:
    choose(deterministic=True)
    assert mode() == (True, True) and not torch.backends.cuda.cudnn_sdp_enabled()
    x, value = computed()
    backward(value)
    assert modes == [(True, False)] and mode() == (True, True)
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


def test_an_operation_without_deterministic_gradient_is_named() -> None:
    choose(deterministic=True)
    with pytest.raises(LearnerError, match="without a deterministic gradient") as error:
        backward(computed(puts=True)[1])
    assert "put_" in error.value.got and "learner.deterministic to false" in error.value.do
    assert mode() == (True, True)
    choose(deterministic=False)
    backward(computed(puts=True)[1])
    assert not modes[-1][0] and torch.backends.cuda.cudnn_sdp_enabled()


def test_other_errors_are_unchanged() -> None:
    choose(deterministic=True)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        backward(torch.ones(2, requires_grad=True) * 2)
    assert mode() == (True, True)
