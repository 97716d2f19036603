"""Which precisions of 16 bits a device multiplies in hardware: the one place that says so, for engine and learner.

On a CPU it is measured, by a few products of milliseconds: what counts is the processor together with what this build
of PyTorch makes of it. With hardware a product takes 0.5 to 2 times float32's time. Without it 3 to 6 times, in the
order of a forward pass, and 5 times (AVX-512) or more than 100 times (AVX2) in that of a backward pass, so that a
training step may not end within half an hour: training is nothing to measure by.
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
"""After which there are no more repetitions than the least."""
_MOST: Final = 2.5
"""Times float32's time that a product in hardware takes; far from both kinds of processors, so that the answer does not
change from one start to the next."""


@cache
def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` has hardware for bfloat16 or float16; False of devices other than CPU and CUDA.

    The first call takes up to some tenths of a second.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return dtype is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and time_over_float32(dtype) < _MOST


@torch.inference_mode()
def time_over_float32(dtype: torch.dtype) -> float:
    """What products on the CPU take in `dtype`, over what they take in float32: both in turns, the fastest of each.

    In one thread, for several wait for the slowest of them, which a busy machine holds up. Not while others compute.
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
    _products_s(*exact), _products_s(*rough)  # The first ones also allocate, and choose their kernels.
    # Everything above the fastest is the machine's other work.
    exact_s = rough_s = float("inf")
    ends_at = time.perf_counter() + _BUDGET_S
    for repeat in range(_REPEATS):
        if repeat >= _LEAST and time.perf_counter() > ends_at:
            break
        exact_s, rough_s = min(exact_s, _products_s(*exact)), min(rough_s, _products_s(*rough))
    return rough_s / exact_s


def _products_s(x: Tensor, weight: Tensor) -> float:
    """Of a linear layer's forward pass, and of its backward pass to the inputs."""
    began = time.perf_counter()
    x @ weight.T
    x @ weight
    return time.perf_counter() - began
