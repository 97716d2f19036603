"""The RMS norm of Llama, Qwen, Mistral and similar models, as one operation of PyTorch.

    y = x / sqrt(mean(x²) + ε) * weight

Transformers writes the norm as seven operations on float32 copies of x. For float32 inputs, this module gives the same
bits. For bfloat16 inputs, CUDA computes the forward and the backward pass in one kernel each (since PyTorch 2.9) and
keeps x in bfloat16; y is rounded once, after the product with the weight. Source: RMSNorm (arXiv 1910.07467).
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def use_in(model: nn.Module) -> int:
    """Replace the forward pass of every RMS norm in `model`, and return their number. Other modules stay unchanged.

    The weights must be in memory and not sharded yet.
    """
    found = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    taken = [module for module in found if _takes_one_input(module) and _is_rms_norm(module)]
    for module in taken:
        module.forward = partial(_forward, module, module.forward)
    return len(taken)


def _takes_one_input(module: nn.Module) -> bool:
    """Return True unless the norm also takes a gate, as norms of linear attention and of Mamba do."""
    return len(signature(module.forward).parameters) == 1


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    """Return True if the module computes an RMS norm with its weight as the factor, tested on a random token."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    x = torch.randn(1, 1, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    return torch.equal(module(x), rms_norm(x, weight.shape, weight.float(), module.variance_epsilon))


def _forward(module: Any, otherwise: Any, x: Tensor) -> Tensor:
    weight = module.weight
    if x.dtype != weight.dtype:  # Transformers then does not return the dtype of x.
        y: Tensor = otherwise(x)
        return y
    if torch.is_autocast_enabled(x.device.type):
        # Autocast would compute the norm of a float32 copy, and return float32.
        with torch.autocast(x.device.type, enabled=False):
            return _forward(module, otherwise, x)
    return rms_norm(x, weight.shape, weight, module.variance_epsilon)
