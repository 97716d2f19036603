"""A stub for a device with little memory: it counts exactly the bytes that are kept for the backward pass, and refuses
more than a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


class _Kept:
    def __init__(self, tensor: Tensor, let_go: Callable[[], None]) -> None:
        self.tensor = tensor
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go()


class LimitedMemory:
    """Limits the bytes that are kept for the backward pass, and measures them with the methods of `probe.MemoryMeter`.
    Weights that the graph keeps count as well; their bytes do not depend on the number of tokens.
    """

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.refused = 0
        self._bytes = 0
        self._count: dict[int, int] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Raise torch.OutOfMemoryError inside the `with` block if a graph keeps too much."""
        self.peak_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield

    def free_bytes(self) -> int:
        return int(self.limit_bytes)

    def _keep(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._count.get(place):
            if self._bytes + size > self.limit_bytes:
                self.refused += 1
                raise torch.OutOfMemoryError(f"Tried to keep {size} bytes beside {self._bytes}.")
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._count[place] = self._count.get(place, 0) + 1
        return _Kept(tensor.detach(), partial(self._let_go, place, size))

    def _let_go(self, place: int, size: int) -> None:
        self._count[place] -= 1
        if not self._count[place]:
            self._bytes -= size
