"""LoRA on the linear layers of mlx-lm's models, by their names in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from echo_node.backends.mlx_families import MlxFamily
from echo_shared.delta.adapter import Adapter, is_adaptable
from echo_shared.errors import BackendError


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer, quantized or not, whose output includes the product of the adapter's matrices, B·A·x."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.update_by: tuple[mx.array, mx.array] | None = None
        """The adapter's matrices A and B for this layer, transposed; None: no adapter."""

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the layer."""
        outputs, inputs = self.linear.weight.shape
        if isinstance(self.linear, nn.QuantizedLinear):
            inputs = inputs * 32 // self.linear.bits  # Quantised weights are packed into 32-bit words.
        return outputs, inputs

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if self.update_by is None:
            return y
        a, b = self.update_by
        return y + (x @ a) @ b


class AdaptedLayers:
    """The layers of a model that adapters may change."""

    def __init__(self, model: Any, family: MlxFamily) -> None:
        """Replace each layer of `model` that adapters may change by an AdaptedLinear around it."""
        wrapped = {
            path: AdaptedLinear(linear)
            for path, linear in model.named_modules()
            if isinstance(linear, nn.Linear | nn.QuantizedLinear)
        }
        parts: dict[str, dict[int, AdaptedLinear]] = {}
        for path, linear in wrapped.items():
            name, place = _in_transformers(path, family)
            if is_adaptable(name):
                parts.setdefault(name, {})[place] = linear
        self._layers = {name: tuple(one for _, one in sorted(some.items())) for name, some in parts.items()}
        adapted = {id(one) for some in self._layers.values() for one in some}
        model.update_modules(tree_unflatten([(path, one) for path, one in wrapped.items() if id(one) in adapted]))

    def check(self, adapter: Adapter) -> None:
        """Raise BackendError if the adapter does not fit the model."""
        for module in adapter.modules:
            shapes = [layer.shape for layer in self._layers.get(module.path, ())]
            if {inputs for _, inputs in shapes} != {module.a.shape[1]} or sum(n for n, _ in shapes) != len(module.b):
                raise BackendError(
                    "An adapter changes a layer that the base model does not have, or that MLX cannot adapt.",
                    got=module.path,
                )

    def use(self, adapter: Adapter | None, dtype: mx.Dtype) -> None:
        updates: dict[int, tuple[mx.array, mx.array]] = {}
        for module in adapter.modules if adapter is not None else ():
            a, layers = mx.array(module.a.T, dtype), self._layers[module.path]
            ends = np.cumsum([layer.shape[0] for layer in layers])
            for layer, b in zip(layers, np.split(module.b, ends[:-1]), strict=True):
                updates[id(layer)] = a, mx.array(b.T, dtype)
        mx.eval(list(updates.values()))
        for layer in self._all():
            layer.update_by = updates.get(id(layer))

    def _all(self) -> Iterable[AdaptedLinear]:
        return (layer for layers in self._layers.values() for layer in layers)


def _in_transformers(path: str, family: MlxFamily) -> tuple[str, int]:
    """Return the name in transformers of a layer of mlx-lm. If mlx-lm splits that layer of transformers, also return
    the index of the part; else 0.
    """
    name = path.removeprefix(family.prefix)
    for place, (end, whole) in enumerate(family.joined.items()):
        if name.endswith(f".{end}"):
            return name.removesuffix(end) + whole, place
    return name, 0
