"""Weights of a GGUF file, for emulating an engine that computes with them (`emulation.Packing`).

llama.cpp multiplies the stored weights by inputs that it rounds to a format of the weights' type (`ggml-cpu.c`,
`type_traits_cpu`): 16 bits for 16-bit weights, 8 bits in blocks of 32 for simple formats, 8 bits in blocks of 256 for
K-quants and IQ formats. Tensors are dequantised when they are used, so the file's weights take little memory.

llama.cpp's order of rows and columns is undone (`echo_shared.gguf.tensor_plan`). A model with weights in another form,
such as experts, is refused; nodes with its file are then judged by the default scales of its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.verify.emulation import SUPERBLOCK, Place, Symmetric, in_blocks, with_mantissa
from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import LearnerError
from echo_shared.gguf.opened_model import OpenedModel
from echo_shared.gguf.parts import Part
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.tensor_plan import BaseWeights, PlannedTensor, plan

_EXACT: Final = ("F32", "F64")
_MANTISSA_BITS: Final = {"F16": 10, "BF16": 7}
_IN_BLOCKS: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")
_COMPARED_ROWS: Final = 64
_MOST_UNLIKE: Final = 0.5
"""Largest allowed distance between the first rows of a weight in the file and in the base, as a share of the norm of
the base's rows. See `gguf_fit`."""
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A weight of the base model, as the file has it."""

    name: str
    """Name of the tensor in the GGUF file that takes the weight's place in products."""
    part: Part
    """Order of the file's rows and columns."""

    @property
    def is_in_order(self) -> bool:
        return self.part.rows is None and self.part.columns is None


class GgufWeights:
    """The weights of one GGUF file, by the addresses of the base model's weights."""

    def __init__(self, file: Path, weights: Mapping[str, Tensor], base_dir: Path) -> None:
        """`weights`: the base model's weights by their names in transformers; `base_dir`: its directory. Raises
        CodecError if the file cannot be read, BackendError if llama.cpp cannot run the model, and LearnerError if the
        file lacks one of these weights, or has it in a form that the emulation does not know.
        """
        self._file = OpenedModel(file)
        self._stored: dict[int, _Stored] = {}
        planned: dict[str, list[PlannedTensor]] = {}
        for tensor in plan(BaseWeights(weights_of(base_dir)), read_shape(base_dir), "f32"):
            for source in tensor.sources:
                planned.setdefault(source, []).append(tensor)
        names = {tensor.name for of_source in planned.values() for tensor in of_source}
        is_tied = _OUTPUT not in names or any(len(of_source) > 1 for of_source in planned.values())
        for name, weight in weights.items():
            if weight.dim() > 1:
                self._take(name, weight, planned.get(name, []), is_tied=is_tied)

    def _take(self, name: str, weight: Tensor, planned: Sequence[PlannedTensor], *, is_tied: bool) -> None:
        found = [one for one in planned if one.name != _OUTPUT or len(planned) == 1]
        if len(found) != 1 or found[0].part.value is not None or len(found[0].sources) > 1:
            raise LearnerError(
                "A GGUF file has a weight in a form that the emulation does not know.",
                got=f"{name}: {', '.join(one.name for one in planned) or 'no tensor'}",
            )
        target = found[0].name
        # The base or the file may use one matrix both as embedding and as output layer.
        if target == _OUTPUT or (target == _EMBEDDING and is_tied):
            target = _OUTPUT if _OUTPUT in self._file.tensors else _EMBEDDING
        if target not in self._file.tensors:
            raise LearnerError("A GGUF file lacks one of the base model's weights.", got=f"{name} ({target})")
        address = weight.untyped_storage().data_ptr()
        self._stored[address] = _Stored(target, found[0].part)
        self._check(name, weight, Place(address, 0))

    def _check(self, name: str, weight: Tensor, place: Place) -> None:
        """Raise LearnerError if the first rows of the file's weight differ much from the same rows of the base
        model.
        """
        if weight.dim() != 2:
            return
        base_OI = weight[:_COMPARED_ROWS].float()
        off = float((self.matrix(base_OI, place) - base_OI).norm() / base_OI.norm().clamp(min=1e-30))
        if not off <= _MOST_UNLIKE:
            raise LearnerError(
                "A GGUF file has a weight in an order that the emulation does not know.",
                got=f"{name} is off by {off:.0%}",
            )

    def matrix(self, weight_OI: Tensor, place: Place) -> Tensor:
        stored = self._stored.get(place.address)
        if stored is None or weight_OI.dim() != 2 or len(self._file.shape(stored.name)) != 2:
            raise LearnerError(
                "A GGUF file has no matrix for a weight of the base model.", got=f"{stored}: {tuple(weight_OI.shape)}"
            )
        outputs, inputs = self._file.shape(stored.name)
        begin, columns = divmod(place.offset, inputs)
        if columns or weight_OI.shape[1] != inputs or begin + len(weight_OI) > outputs:
            raise LearnerError(
                "A product with a part of a weight cannot be computed with a GGUF file.",
                got=f"{stored.name}: {tuple(weight_OI.shape)} of {(outputs, inputs)}",
            )
        count = len(weight_OI)
        if stored.is_in_order:
            rows = self._file.rows(stored.name, count, begin)
        else:
            rows = _ordered(self._file.rows(stored.name, outputs), stored.part)[begin : begin + count]
        return torch.from_numpy(np.array(rows)).to(weight_OI.device)

    def inputs(self, inputs: Tensor, place: Place) -> Tensor:
        kind: str = self._file.tensors[self._stored[place.address].name].tensor_type.name
        if kind in _EXACT:
            return inputs
        if kind in _MANTISSA_BITS:
            return with_mantissa(inputs, _MANTISSA_BITS[kind])
        return in_blocks(inputs, Symmetric(8)) if kind in _IN_BLOCKS else in_blocks(inputs, Symmetric(8), SUPERBLOCK)

    def embeddings(self, weight_VH: Tensor, ids: Tensor, place: Place) -> Tensor | None:
        if place.address not in self._stored:
            return None
        used, of_used = np.unique(ids.numpy(force=True), return_inverse=True)
        rows = self._file.rows_at(_EMBEDDING, used)[of_used.reshape(ids.shape)]
        return torch.from_numpy(rows).to(weight_VH.device)


def _ordered(given_OI: NDArray[np.float32], part: Part) -> NDArray[np.float32]:
    """Return the weight from the GGUF file, with rows and columns in the order that transformers uses."""
    if part.rows is not None:
        given_OI, moved = np.empty_like(given_OI), given_OI
        given_OI[part.rows] = moved
    if part.columns is not None:
        given_OI, moved = np.empty_like(given_OI), given_OI
        given_OI[:, part.columns] = moved
    return given_OI
