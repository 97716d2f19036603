"""Bit-identical gradients at every repetition, if `learner.deterministic` is set.

PyTorch's flash and memory-efficient attention use their deterministic backward pass only in strict mode. The mode that
only warns is not enough. But strict mode must be off elsewhere: on CUDA, cumulative sums have no deterministic kernel,
and sampling and the screen for forged rollouts (`screen`) need them. cuDNN's attention has no deterministic backward
pass at all, so it is turned off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo_shared.errors import LearnerError


def choose(*, deterministic: bool) -> None:
    """Turn PyTorch's deterministic kernels on or off, for the whole process."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)


def backward(value: Tensor) -> None:
    """Run the backward pass of `value`, which adds gradients to the parameters.

    Raises LearnerError if a part of the model has no deterministic backward pass, but the settings require one.
    """
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
            "This base model has an operation without a deterministic gradient.",
            got=str(error),
            do="Set learner.deterministic to false.",
        ) from error
    finally:
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warns)
