"""Times of PyTorch's work on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize() -> None:
    """Wait until a GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Run work on the device; return seconds and result."""
    synchronize()
    began = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - began, result


def matrix_operations_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the fastest of six."""
    size = 8_192 if device.type == "cuda" else 1_024
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    return float(2 * size**3 / min(timed(lambda: left @ right)[0] for _ in range(6)))
