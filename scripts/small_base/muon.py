"""Muon in float32: PyTorch's version computes in bfloat16, which most CPUs only emulate.

Source: Keller Jordan and others, "Muon: An optimizer for hidden layers in neural networks" (2024). The scale that lets
matrices use AdamW's learning rates is from Moonshot AI, arXiv 2502.16982, eq. 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

MOMENTUM: Final = 0.95
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial of degree 5 that `orthogonal` applies repeatedly. It brings all singular values close
to 1.
"""
ITERATIONS: Final = 5


class Muon:
    """The Muon optimizer for matrices [O, I]. The update of a matrix is its momentum, made orthogonal."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, weight_decay: float = 0.01) -> None:
        self._matrices = list(matrices)
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            if matrix.grad is None:
                continue
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp_(momentum, MOMENTUM))
            matrix.mul_(1 - learning_rate * self._weight_decay)
            matrix.add_(update, alpha=-learning_rate * 0.2 * max(matrix.shape) ** 0.5)
            matrix.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrix: all singular values become 0.7 to 1.2."""
    found: Tensor = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / (found.norm() + 1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = found @ found.T
        found = first * found + (third * square + fifth * square @ square) @ found
    turned: Tensor = found.T if matrix.shape[0] > matrix.shape[1] else found
    return turned
