"""The tensors of a model file: their names, sources and types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from echo_shared.delta.base_weights import unsupported_model
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import BackendError
from echo_shared.gguf.parts import Part, layer_of
from echo_shared.gguf.precisions import FILE_TYPES
from echo_shared.gguf.shape import ModelShape

_EXPERT: Final = re.compile(r"(?P<before>.+\.experts)\.(?P<number>\d+)\.(?P<after>.+)")
_Q8_0_BLOCK: Final = 32
_NEVER_ROUNDED: Final = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
"""Ends of the names of tensors with several dimensions that llama.cpp wants in float32: norms, routers and short
convolutions.
"""
_OUTPUT: Final = "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor of the model file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    sources: tuple[str, ...]
    """Names of the tensors in transformers from which the tensor is made. Several names: the experts of a layer, in
    order, which become one tensor.
    """
    part: Part

    def data(self, source: Mapping[str, NDArray[np.float32]]) -> NDArray[Any]:
        """Return the tensor's data in the type of the GGUF file, made from the base model's tensors in `source`."""
        made = [gguf.quants.quantize(self._of(source[name]), self.kind) for name in self.sources]
        return made[0] if len(made) == 1 else np.stack(made)

    def _of(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.part.of(array))


class BaseWeights(Mapping[str, NDArray[np.float32]]):
    """The tensors of all files of a base model. Within a file, they are in the order of their names."""

    def __init__(self, files: Sequence[Path]) -> None:
        opened = [TensorFile(file) for file in files]
        self._files = {name: file for file in opened for name in sorted(file)}

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._files[name][name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape without reading its data."""
        return self._files[name].shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def plan(weights: BaseWeights, shape: ModelShape, precision: str) -> list[PlannedTensor]:
    """Return the tensors of a model file in this precision. Raises BackendError if llama.cpp has no place for a
    tensor.
    """
    names = gguf.get_tensor_name_map(shape.family.arch, shape.num_layers)
    planned = []
    for name, sources in _grouped(weights, shape).items():
        parts = shape.family.parts(name)
        if parts and name.endswith(".bias") and layer_of(name) not in shape.family.biased:
            raise unsupported_model(f"a bias of {layer_of(name)}: {name}")
        for part in parts:
            target = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise unsupported_model(f"a tensor named {name}")
            dims = _made_shape(part, weights.shape(sources[0]))
            dims = dims if len(sources) == 1 else (len(sources), *dims)
            kind = _kind(target, dims, precision)
            planned.append(PlannedTensor(name=target, shape=dims, kind=kind, sources=sources, part=part))
    if not planned:
        raise BackendError("The base model has no weights.", got="no tensor in its safetensors files")
    if shape.family.needs_output and all(tensor.name != _OUTPUT for tensor in planned):
        planned += [_as_output(tensor) for tensor in planned if tensor.name == "token_embd.weight"]
    return planned


def _as_output(embedding: PlannedTensor) -> PlannedTensor:
    return PlannedTensor(
        name=_OUTPUT, shape=embedding.shape, kind=embedding.kind, sources=embedding.sources, part=embedding.part
    )


def _grouped(weights: BaseWeights, shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return, for each tensor of the GGUF file, the names of the base model's tensors from which it is made. All
    experts of a layer form one tensor, whose name has no expert number.
    """
    grouped: dict[str, dict[int, str]] = {}
    alone: dict[str, tuple[str, ...]] = {}
    for name in weights:
        if _is_left_out(name, shape):
            continue
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            alone[name] = (name,)
            continue
        key = f"{expert['before']}.{expert['after']}"
        alone[key] = ()  # Reserve the merged tensor's place: that of the layer's first expert.
        grouped.setdefault(key, {})[int(expert["number"])] = name
    for key, found in grouped.items():
        if sorted(found) != list(range(shape.family.num_experts)):
            raise BackendError(
                "The base model lacks some of its experts.", got=f"{len(found)} of {shape.family.num_experts}: {key}"
            )
        alone[key] = tuple(found[number] for number in sorted(found))
    return alone


def _is_left_out(name: str, shape: ModelShape) -> bool:
    # Without an output matrix, llama.cpp uses the embedding for the output.
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")


def _made_shape(part: Part, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that `part` gets from a tensor with the shape `dims`. Reads no weights."""
    if part.rows is None and part.columns is None and part.value is None:
        return dims
    return part.of(np.broadcast_to(np.float32(0), dims)).shape


def _kind(name: str, dims: tuple[int, ...], precision: str) -> gguf.GGMLQuantizationType:
    if len(dims) < 2 or not name.endswith(".weight") or name.endswith(_NEVER_ROUNDED):
        return gguf.GGMLQuantizationType.F32
    if precision == "q8_0" and dims[-1] % _Q8_0_BLOCK:
        return gguf.GGMLQuantizationType.F16
    return FILE_TYPES[precision][1]
