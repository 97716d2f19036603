"""Linear layers of a model that only samples: adapters switched by assignment, and packed weights on CPUs.

On x86, a frozen weight is reordered once into oneDNN's own layout, as torch.compile does when it freezes a graph. This
is two to three times as fast as PyTorch's plain float32 product on AMD CPUs, and up to twice as fast in bfloat16. The
reordered copy replaces the weight, unless the weight is also the token embedding.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from echo_shared.delta.adapter import is_adaptable

_PACKED_PRODUCTS: Final = 2**22
"""Minimum number of multiplications in one product. For smaller products, calling oneDNN costs more than it saves. A
product of fewer than 16 rows counts as one of 16 rows.
"""

Update = tuple[Tensor, Tensor]
"""Matrices A [rank, inputs] and B [outputs, rank] of one layer. B includes the scaling."""


class SamplerLinear(nn.Module):
    """`linear` with frozen weights. If it has an update, B·A·x is added."""

    def __init__(self, linear: nn.Linear, *, rows: int) -> None:
        super().__init__()
        self.shape: Final = (linear.out_features, linear.in_features)
        self._update: Update | None = None
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight = linear.weight.detach()
        self._is_packed = self._weight.numel() * max(rows, 16) >= _PACKED_PRODUCTS and _can_pack(self._weight)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, rows)

    def set_update(self, update: Update | None, *, in_place: bool) -> bool:
        """Add `update` from now on. With `in_place`, its values are copied into the previous update's tensors, which
        CUDA graphs read. Return False if graphs that were captured before would still compute with the previous update.
        """
        previous = self._update
        if not in_place:
            self._update = update
            return False
        if update is not None and previous is not None and all(map(_same_shape, previous, update)):
            for mine, new in zip(previous, update, strict=True):
                mine.copy_(new)
            return True
        self._update = None if update is None else (update[0].clone(), update[1].clone())
        return previous is None and update is None

    def forward(self, x: Tensor) -> Tensor:
        if self._is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = functional.linear(x, self._weight, self._bias)
        if self._update is None:
            return y
        a, b = self._update
        return y + functional.linear(functional.linear(x, a), b)


def replace_linears(model: Any, *, rows: int) -> Mapping[str, SamplerLinear]:
    """Replace the model's projections and output layer by SamplerLinear. Return the projections by path.

    `rows`: sequences per step, for which the packed layout is chosen.
    """
    projections: dict[str, SamplerLinear] = {}
    output = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or not (is_adaptable(path) or layer is output):
            continue
        replaced = SamplerLinear(layer, rows=rows)
        model.set_submodule(path, replaced)
        if is_adaptable(path):
            projections[path] = replaced
    return projections


def _same_shape(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bool(has_bf16)
