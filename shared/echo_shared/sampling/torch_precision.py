"""Detects whether a device multiplies 16-bit numbers in hardware, for engine and learner.

A CPU's support depends on the processor and on PyTorch's build, so it is measured with a few short products. With
hardware support, a product takes 0.5 to 2 times float32's time. Without it, a forward pass's product takes 3 to 6
times, and a backward pass's 5 times (AVX-512) or more than 100 times (AVX2). A training step could then take more than
half an hour, so training itself cannot serve as the measurement.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Final

import torch
from torch import Tensor

_ROWS: Final = 32
_WIDTH: Final = 512
_REPEATS: Final = 20
_LEAST: Final = 3
_BUDGET_S: Final = 0.1
"""Seconds of measuring after which no further repetition starts, once `_LEAST` repetitions are done."""
_MOST: Final = 2.5
"""Largest ratio of a 16-bit product's time to a float32 product's time that counts as hardware support. Processors with
and without support are far from this value, so repeated measurements agree.
"""


@cache
def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `device` multiplies bfloat16 or float16 in hardware; False for devices other than CPU and CUDA.

    The first call takes up to a few tenths of a second.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return dtype is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and time_over_float32(dtype) < _MOST


@torch.inference_mode()
def time_over_float32(dtype: torch.dtype) -> float:
    """Return a CPU product's time in `dtype` divided by its time in float32. The two alternate, and the fastest of each
    counts.

    Uses one thread, because several threads would wait for the slowest one on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _time_over_float32(dtype)
    finally:
        torch.set_num_threads(threads)


def _time_over_float32(dtype: torch.dtype) -> float:
    exact = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    rough = exact[0].to(dtype), exact[1].to(dtype)
    _products_s(*exact), _products_s(*rough)  # Warm up: the first products allocate and choose kernels.
    # Take the fastest of several times: slower ones include other load of the machine.
    exact_s = rough_s = float("inf")
    ends_at = time.perf_counter() + _BUDGET_S
    for repeat in range(_REPEATS):
        if repeat >= _LEAST and time.perf_counter() > ends_at:
            break
        exact_s, rough_s = min(exact_s, _products_s(*exact)), min(rough_s, _products_s(*rough))
    return rough_s / exact_s


def _products_s(x: Tensor, weight: Tensor) -> float:
    began = time.perf_counter()
    x @ weight.T
    x @ weight
    return time.perf_counter() - began
