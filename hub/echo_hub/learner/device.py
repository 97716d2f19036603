"""Choose the PyTorch device that a setting names, and move tensors to it."""

from __future__ import annotations

import torch
from torch import Tensor

from echo_shared.errors import LearnerError


def resolve_device(name: str) -> torch.device:
    """Return the device of a setting such as learner.device. Raises LearnerError if the setting needs CUDA and there is
    none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise LearnerError(
            "PyTorch finds no CUDA device.", got=f"learner.device = {name}", do="Set learner.device to auto or cpu."
        )
    return torch.device(name)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Return host tensors on the device. A GPU copies from pinned memory, and the host does not wait for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
