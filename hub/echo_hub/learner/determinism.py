"""Gradients that are the same to the bit each time, where `learner.deterministic` asks for it.

PyTorch's flash and memory-efficient attention have a backward pass that is deterministic, and take it only where the
mode is strict: one that warns alone is not enough. All else cannot be strict, for on CUDA a cumulative sum, which the
screen and the sampler take, has no such kernel. cuDNN's attention has no deterministic backward pass at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo_shared.errors import LearnerError


def choose(*, deterministic: bool) -> None:
    """For the whole process."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)


def backward(value: Tensor) -> None:
    """Adds the gradients of `value`. Raises LearnerError when the model has a part without a deterministic one."""
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:
        torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        torch.autograd.backward(value)
    except RuntimeError as error:
        if not strict or "deterministic" not in str(error):
            raise
        raise LearnerError(
            "This base model cannot be trained so that a repeated step gives the very same adapter.",
            got=str(error),
            do="Set learner.deterministic to false.",
        ) from error
    finally:
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warns)
