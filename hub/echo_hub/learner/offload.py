"""Room on the learner's device for sampling: the optimizer's state waits in the host's memory until the next step.

The weights stay where they are: whoever samples uses the trained model's own tensors. Source: LlamaRL (arXiv
2505.24034), which moves the trainer's state off the GPU while the generator beside it works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Offload:
    """The state of one optimizer, here or there. Both methods do nothing when they are called again, and change no
    value."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._away = False
        # Kept from one time to the next: to pin memory takes longer than to fill it.
        self._on_host: dict[tuple[Any, str], Tensor] = {}

    def make_room(self) -> None:
        """Before sampling: drops the gradients and moves the state to the host."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._away:
            return
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    state[name] = self._buffer((parameter, name), value).copy_(value, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._away = True

    def take_back(self) -> None:
        """Before a step: gives back what sampling held (keys and values), and moves the state to the device."""
        if not self._away:
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for (parameter, name), buffer in self._on_host.items():
            self._optimizer.state[parameter][name] = buffer.to(parameter.device, non_blocking=True, copy=True)
        self._away = False

    def _buffer(self, key: tuple[Any, str], like: Tensor) -> Tensor:
        if key not in self._on_host:
            self._on_host[key] = torch.empty_like(like, device="cpu", pin_memory=self._device.type == "cuda")
        return self._on_host[key]
