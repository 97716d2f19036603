"""Free device memory for sampling by moving the optimizer's state to host memory until the next step.

The weights stay on the device, because sampling uses the trained model's own tensors. Source: LlamaRL (arXiv
2505.24034), which offloads the trainer's state while a co-located generator runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Offload:
    """Moves the optimizer's state between device and host, without changing values. A second move to the same place
    does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._away = False
        # Host buffers are reused between calls, because pinning memory takes longer than copying.
        self._on_host: dict[tuple[Any, str], Tensor] = {}

    def make_room(self) -> None:
        """Call before sampling: drop the gradients and move the state to the host."""
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
        """Call before a step: free the memory of sampling (keys and values), and move the state back to the device."""
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
