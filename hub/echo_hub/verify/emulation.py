"""Emulate engines of lower precision on the hub's own model, to measure their rounding without running them.

    with emulating("q8_0", weights):
        states = policy's forward pass        computes each matrix product as an 8-bit engine does

A PyTorch dispatch mode intercepts every operator and rounds what an engine of the precision rounds:

    f16, bf16    the mantissa of every operator's result, as a model in that precision stores it; the range is not
                 limited, because such a model computes sums of squares in float32
    q8_0, ...    in products with the model's weights: weights in blocks as llama.cpp packs them, the other factor
                 to 8 bits in blocks of 32, as llama.cpp does before integer products
    f32          nothing; a model stored in 16 bits is computed in float32

    with emulating(GgufWeights(...), weights):      computes with the weights of a GGUF file (`gguf_weights`)

So the emulation needs no second copy of the model and no other library. It works with any forward pass, on the
verifier's device. Formats follow ggml's `ggml-quants.c`, and the choice of types `llama-quant.cpp`. If an engine uses
finer types for some layers, the emulation uses the coarser type for all, so it is never finer than the real engine.
Blocks begin at the engine's block boundaries. A base unpacked from such a format therefore loses as little as in the
engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

BLOCK: Final = 32
SUPERBLOCK: Final = 256
"""Number of inputs in one block of llama.cpp's K-quants. A layer whose number of inputs is not a multiple of it gets a
simpler format."""
_aten = torch.ops.aten
_MANTISSA_BITS: Final = {"f16": 10, "bf16": 7}
_EXACT: Final = "f32"
_HALVES: Final = (torch.bfloat16, torch.float16)
_PRODUCTS: Final = {_aten.mm: 0, _aten.addmm: 1, _aten.addmm_: 1, _aten._grouped_mm: 0}
"""Matrix products, each with the index of the argument that is the first factor. The argument after it is the
transposed weight of a layer, or the weights of all experts."""

_OF_WEIGHT: Final = "_echo_of_base_weight"
"""Name of the attribute that marks a copied base weight; its value is a `Place`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Consecutive rows of a weight of the base model, named by their position in memory."""

    address: int
    """Address of the base weight's storage."""
    offset: int
    """Number of the weight's values before the first row."""


class Packing(Protocol):
    """How an engine stores and multiplies the base weights. O and I: number of a layer's outputs and inputs."""

    def matrix(self, weight_OI: Tensor, place: Place) -> Tensor:
        """Return the rows at `place` of a weight, in float32, with the values that the engine stores."""

    def inputs(self, inputs: Tensor, place: Place) -> Tensor:
        """Return a layer's inputs as the engine multiplies them with the weight."""

    def embeddings(self, weight_VH: Tensor, ids: Tensor, place: Place) -> Tensor | None:
        """Return the rows `ids` of an embedding in float32, as the engine stores them; None: the engine stores them as
        the hub's model does."""


class Rounding(Protocol):
    """How an engine rounds blocks of values."""

    def rounded(self, blocks: Tensor) -> Tensor:
        """Return the rounded values of each block, a row of `blocks`."""


@dataclass(frozen=True, slots=True)
class Symmetric:
    """Rounding to `bits` bits with one float16 scale per block, as q8_0, q5_0 and q4_0 do."""

    bits: int

    def rounded(self, blocks: Tensor) -> Tensor:
        most = 2 ** (self.bits - 1) - 1
        scale = _in_float16(blocks.abs().amax(dim=-1, keepdim=True) / most)
        whole: Tensor = (blocks / scale.clamp(min=1e-12)).round().clamp(-most - 1, most)
        rounded_to: Tensor = whole * scale
        return rounded_to


@dataclass(frozen=True, slots=True)
class Affine:
    """Rounding to `bits` bits with a float16 scale and minimum per block, as q5_1 does and K-quants nearly do."""

    bits: int

    def rounded(self, blocks: Tensor) -> Tensor:
        most = 2**self.bits - 1
        low = _in_float16(blocks.amin(dim=-1, keepdim=True))
        scale = _in_float16((blocks.amax(dim=-1, keepdim=True) - low) / most)
        whole: Tensor = ((blocks - low) / scale.clamp(min=1e-12)).round().clamp(0, most)
        rounded_to: Tensor = whole * scale + low
        return rounded_to


def _in_float16(values: Tensor) -> Tensor:
    """Round float32 `values` to float16. Values outside the range of float16 become its largest values."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half().float()


def _weight_rounding(precision: str, num_inputs: int) -> Rounding:
    """Return the rounding of the weights of a layer with `num_inputs` inputs. An unknown precision gets `Symmetric(4)`,
    the coarsest rounding."""
    is_whole = num_inputs % SUPERBLOCK == 0
    if precision.startswith("q8"):
        return Symmetric(8)
    if precision.startswith("q6"):
        return Symmetric(6) if is_whole else Symmetric(8)
    if precision.startswith("q5"):
        return Affine(5)
    if precision.startswith("q4_k"):
        return Affine(4) if is_whole else Symmetric(5)
    return Symmetric(4)


def with_mantissa(values: Tensor, bits: int) -> Tensor:
    """Round float32 `values` to `bits` bits of mantissa, to nearest, ties away from 0. The range stays that of
    float32."""
    spare = 23 - bits
    whole: Tensor = values.contiguous().view(torch.int32).add(1 << (spare - 1)) >> spare << spare
    return whole.view(torch.float32)


def in_blocks(values: Tensor, rounding: Rounding, block: int = BLOCK) -> Tensor:
    """Return `values` in float32, rounded in blocks of this size along the last dimension."""
    size = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -size % block))
    return rounding.rounded(padded.unflatten(-1, (-1, block))).flatten(-2)[..., :size]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packing of the base model's own weights in a precision such as q8_0."""

    precision: str

    def matrix(self, weight_OI: Tensor, place: Place) -> Tensor:
        return in_blocks(weight_OI, _weight_rounding(self.precision, weight_OI.shape[-1]))

    def inputs(self, inputs: Tensor, place: Place) -> Tensor:
        return in_blocks(inputs, Symmetric(8))

    def embeddings(self, weight_VH: Tensor, ids: Tensor, place: Place) -> Tensor | None:
        return None


class _Emulation(TorchDispatchMode):
    def __init__(self, packing: Packing | None, weights: Collection[int], *, mantissa_bits: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._packing = packing
        self._mantissa_bits = mantissa_bits
        self._weights = weights
        self._last: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] | None = None
        """Key and result of the last call of `_packed_weight`: the output layer needs the same weight for each chunk of
        rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = _is_view(func)
        if is_view or func.overloadpacket is _aten._to_copy:
            result = func(*args, **_exact_dtype(kwargs))
            # Mark copies of weights, because a copy's storage has another address.
            if isinstance(result, Tensor):
                self._mark(result, args[0], is_view=is_view)
            return result if is_view or self._mantissa_bits is None else self._rounded(func, result)
        factor = None if self._packing is None else _PRODUCTS.get(func.overloadpacket)
        replaced: dict[int, Tensor] = {}
        if self._packing is not None and factor is not None and (place := self._place(args[factor + 1])) is not None:
            replaced[factor + 1] = self._packed_weight(args[factor + 1], place, self._packing)
            replaced[factor] = self._packing.inputs(_exact(args[factor]), place)
        if self._packing is not None and func.overloadpacket is _aten.embedding:
            place = self._place(args[0])
            rows = None if place is None else self._packing.embeddings(args[0], args[1], place)
            if rows is not None:
                return rows
        args, kwargs = tree_map(_exact, (list(args), _exact_dtype(kwargs)))
        for at, value in replaced.items():
            args[at] = value
        if kwargs.pop("out_dtype", None) is not None or func is getattr(_aten.mm, "dtype_out", None):
            func, args = _aten.mm.out, args[:2]
        result = func(*args, **kwargs)
        return result if self._mantissa_bits is None else self._rounded(func, result)

    def _place(self, value: Any) -> Place | None:
        """Return the place of a base weight, its views and its copies; None for other tensors."""
        if not isinstance(value, Tensor):
            return None
        begin: Place | None = getattr(value, _OF_WEIGHT, None)
        if begin is None:
            address = value.untyped_storage().data_ptr()
            begin = Place(address, 0) if address in self._weights else None
        return None if begin is None else Place(begin.address, begin.offset + int(value.storage_offset()))

    def _mark(self, result: Tensor, source: Any, *, is_view: bool) -> None:
        """Mark `result`, a view or copy of `source`, with the place at which its storage begins."""
        if is_view:
            begin = getattr(source, _OF_WEIGHT, None) if isinstance(source, Tensor) else None
        else:
            begin = self._place(source)
        if begin is not None:
            setattr(result, _OF_WEIGHT, begin)

    def _rounded(self, func: Any, result: Any) -> Any:
        """Return the rounded result; an operator that writes in place has its result rounded in place."""
        assert self._mantissa_bits is not None
        if isinstance(result, Tensor) and result.dtype is torch.float32 and result.dim() > 1:
            rounded = with_mantissa(result, self._mantissa_bits)
            return result.copy_(rounded) if func._schema.is_mutable else rounded
        return result

    def _packed_weight(self, weight_IO: Tensor, place: Place, packing: Packing) -> Tensor:
        """Return the transposed weight of a layer in float32, as the engine packs it. I and O: number of inputs and
        outputs. Weights of experts have a dimension more."""
        is_kept = weight_IO.untyped_storage().data_ptr() in self._weights
        key = (weight_IO.data_ptr(), tuple(weight_IO.shape), tuple(weight_IO.stride()))
        if is_kept and self._last is not None and self._last[0] == key:
            return self._last[1]
        packed = packing.matrix(weight_IO.mT, place).mT
        self._last = (key, packed) if is_kept else None
        return packed


def _is_view(func: Any) -> bool:
    """Return True if the operator returns a view of its first argument and writes nothing."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


@contextmanager
def emulating(engine: str | Packing, weights: Collection[int]) -> Iterator[None]:
    """Inside the `with` block, round computations as an engine of this precision, or with this packing, does. No
    autograd graph is recorded.

    `weights`: addresses of the storages (`untyped_storage().data_ptr()`) of all weights that such an engine packs.
    """
    bits = _MANTISSA_BITS.get(engine) if isinstance(engine, str) else None
    packing = _Packed(engine) if isinstance(engine, str) else engine
    is_unpacked = bits is not None or engine == _EXACT
    with torch.no_grad(), _Emulation(None if is_unpacked else packing, weights, mantissa_bits=bits):
        yield


def exactly(*, in_float32: bool) -> AbstractContextManager[None]:
    """With `in_float32`, compute inside the `with` block in float32 although the weights are stored in 16 bits; no
    autograd graph is recorded. Each weight is converted only when it is used, so the model takes half the memory, and
    the results equal those of float32 weights.
    """
    return emulating(_EXACT, ()) if in_float32 else nullcontext()


def _exact(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _exact_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "dtype": torch.float32} if kwargs.get("dtype") in _HALVES else kwargs
